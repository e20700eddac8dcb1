// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "planner/problem.hpp"
#include "planner/program.hpp"

namespace ttnn_moe::planner {

// Each function makes the program of one operator for one device. The tables at the head of the kernels list
// the tensors that placeholders name, and their shapes. Throws std::invalid_argument, with the reason, if no
// program is possible.

// topk_ids, topk_weights, device_expert_mapping -> num_routed_tokens, routed_tokens, routed_token_weights
Program plan_routing(const Problem& problem, const Machine& machine);

// hidden, routing, weight_0 (, weight_1) -> out. weights 2: gate, up and SiLU*mul in one pass; 1: one
// projection.
Program plan_gate_up(const Problem& problem, const Machine& machine, std::uint32_t weights);

// gate, up -> out = silu(gate) * up, over all rows that a device can have
Program plan_silu_mul(const Problem& problem, const Machine& machine);

// activations, routing, weight_0 -> out, written or (scalar "accumulate" = 1) added to
Program plan_down(const Problem& problem, const Machine& machine);

}  // namespace ttnn_moe::planner
