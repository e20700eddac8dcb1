// SPDX-License-Identifier: Apache-2.0
#include "routing.hpp"

#include <vector>

#include "device/routing_device_operation.hpp"
#include "ttnn_ops/common/checks.hpp"
#include "ttnn_ops/common/plans.hpp"

namespace ttnn::experimental {

std::tuple<ttnn::Tensor, ttnn::Tensor, ttnn::Tensor> moe_routing(
    const ttnn::Tensor& topk_ids, const ttnn::Tensor& topk_weights, const ttnn::Tensor& device_expert_mapping,
    std::uint32_t num_experts, std::optional<std::uint32_t> token_bound,
    const std::optional<std::tuple<ttnn::Tensor, ttnn::Tensor, ttnn::Tensor>>& output_tensors,
    const std::optional<tt::tt_metal::MemoryConfig>& memory_config,
    const std::optional<tt::tt_metal::SubDeviceId>& subdevice_id) {
    namespace moe = operations::experimental::moe;
    std::vector<ttnn::Tensor> outputs;
    if (output_tensors.has_value()) {
        const auto& [counts, tokens, weights] = *output_tensors;
        outputs = {counts, tokens, weights};
    }
    const std::uint32_t T = moe::size_of("topk_ids", topk_ids, 2, 0);
    const auto made =
        prim::moe_routing(topk_ids, topk_weights, device_expert_mapping, num_experts,
                          token_bound.value_or(moe::bound_of(T)), outputs, memory_config, subdevice_id);
    return {made[0], made[1], made[2]};
}

}  // namespace ttnn::experimental
