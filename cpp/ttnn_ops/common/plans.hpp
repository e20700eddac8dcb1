// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "planner/problem.hpp"
#include "planner/program.hpp"
#include "ttnn/tensor/tensor.hpp"

namespace ttnn::operations::experimental::moe {

namespace planner = ::ttnn_moe::planner;

// What a program may use of the device, or of each device of the mesh, that a tensor lies on.
planner::Machine machine_of(const ttnn::Tensor& tensor);

// The program of "routing", "gate_up", "project", "silu_mul" or "down", planned when first asked for: a cache
// hit plans nothing. Throws, in the words of checks.hpp, if there is none.
const planner::Program& plan(const std::string& name, const planner::Problem& problem,
                             const planner::Machine& machine);

// The T that a call of T tokens is planned for, so that one program serves many T: a power of two from 32.
std::uint32_t bound_of(std::uint32_t T);

// Rows of a step tensor: whole blocks of 32 for each expert.
std::uint32_t rows_of(const planner::Problem& problem);

}  // namespace ttnn::operations::experimental::moe
