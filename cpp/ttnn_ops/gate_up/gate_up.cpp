// SPDX-License-Identifier: Apache-2.0
#include "gate_up.hpp"

#include "device/gate_up_device_operation.hpp"

namespace ttnn::experimental {

ttnn::Tensor moe_gate_up(const ttnn::Tensor& hidden, const ttnn::Tensor& num_routed_tokens,
                         const ttnn::Tensor& device_expert_mapping, const ttnn::Tensor& routed_tokens,
                         const ttnn::Tensor& gate, const std::optional<ttnn::Tensor>& up,
                         std::uint32_t experts_per_token, const std::optional<ttnn::Tensor>& output_tensor,
                         const std::optional<tt::tt_metal::MemoryConfig>& memory_config,
                         const std::optional<tt::tt_metal::SubDeviceId>& subdevice_id,
                         const std::optional<DeviceComputeKernelConfig>& compute_kernel_config) {
    return prim::moe_gate_up(hidden, num_routed_tokens, device_expert_mapping, routed_tokens, gate, up,
                             experts_per_token, output_tensor, memory_config, subdevice_id,
                             compute_kernel_config);
}

}  // namespace ttnn::experimental
