// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <tt-metalium/sub_device_types.hpp>

#include "ttnn/tensor/tensor.hpp"

namespace ttnn::experimental {

// silu(gate) * up, over all rows of two step tensors.
ttnn::Tensor moe_silu_mul(const ttnn::Tensor& gate, const ttnn::Tensor& up,
                          const std::optional<ttnn::Tensor>& output_tensor = std::nullopt,
                          const std::optional<tt::tt_metal::MemoryConfig>& memory_config = std::nullopt,
                          const std::optional<tt::tt_metal::SubDeviceId>& subdevice_id = std::nullopt);

}  // namespace ttnn::experimental
