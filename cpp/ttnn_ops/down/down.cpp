// SPDX-License-Identifier: Apache-2.0
#include "down.hpp"

#include "device/down_device_operation.hpp"

namespace ttnn::experimental {

ttnn::Tensor moe_down(const ttnn::Tensor& activations, const ttnn::Tensor& num_routed_tokens,
                      const ttnn::Tensor& device_expert_mapping, const ttnn::Tensor& routed_tokens,
                      const ttnn::Tensor& routed_token_weights, const ttnn::Tensor& weight,
                      std::uint32_t experts_per_token, std::uint32_t num_tokens,
                      std::optional<tt::tt_metal::DataType> output_dtype, bool accumulate,
                      const std::optional<ttnn::Tensor>& output_tensor,
                      const std::optional<tt::tt_metal::MemoryConfig>& memory_config,
                      const std::optional<tt::tt_metal::SubDeviceId>& subdevice_id,
                      const std::optional<DeviceComputeKernelConfig>& compute_kernel_config) {
    const auto dtype = output_tensor.has_value() ? output_tensor->dtype() : tt::tt_metal::DataType::BFLOAT16;
    return prim::moe_down(activations, num_routed_tokens, device_expert_mapping, routed_tokens,
                          routed_token_weights, weight, experts_per_token, num_tokens,
                          output_dtype.value_or(dtype), accumulate, output_tensor, memory_config,
                          subdevice_id, compute_kernel_config);
}

}  // namespace ttnn::experimental
