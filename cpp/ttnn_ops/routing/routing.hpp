// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <tt-metalium/sub_device_types.hpp>
#include <tuple>

#include "ttnn/tensor/tensor.hpp"

namespace ttnn::experimental {

// For each expert, the tokens that go to it and their weights: num_routed_tokens, routed_tokens,
// routed_token_weights, as this device's kernels read them. token_bound: most tokens of a call that the
// program and the outputs serve; by default T rounded up to a power of two, at least 32.
std::tuple<ttnn::Tensor, ttnn::Tensor, ttnn::Tensor> moe_routing(
    const ttnn::Tensor& topk_ids, const ttnn::Tensor& topk_weights, const ttnn::Tensor& device_expert_mapping,
    std::uint32_t num_experts, std::optional<std::uint32_t> token_bound = std::nullopt,
    const std::optional<std::tuple<ttnn::Tensor, ttnn::Tensor, ttnn::Tensor>>& output_tensors = std::nullopt,
    const std::optional<tt::tt_metal::MemoryConfig>& memory_config = std::nullopt,
    const std::optional<tt::tt_metal::SubDeviceId>& subdevice_id = std::nullopt);

}  // namespace ttnn::experimental
