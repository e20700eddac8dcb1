// SPDX-License-Identifier: Apache-2.0
#include "silu_mul.hpp"

#include "device/silu_mul_device_operation.hpp"

namespace ttnn::experimental {

ttnn::Tensor moe_silu_mul(const ttnn::Tensor& gate, const ttnn::Tensor& up,
                          const std::optional<ttnn::Tensor>& output_tensor,
                          const std::optional<tt::tt_metal::MemoryConfig>& memory_config,
                          const std::optional<tt::tt_metal::SubDeviceId>& subdevice_id) {
    return prim::moe_silu_mul(gate, up, output_tensor, memory_config, subdevice_id);
}

}  // namespace ttnn::experimental
