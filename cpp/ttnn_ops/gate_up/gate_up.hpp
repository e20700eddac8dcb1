// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <tt-metalium/sub_device_types.hpp>

#include "ttnn/operations/core/compute_kernel/compute_kernel_config.hpp"
#include "ttnn/tensor/tensor.hpp"

namespace ttnn::experimental {

// silu(hidden gate) * (hidden up) of the rows of each expert; without up, hidden gate.
ttnn::Tensor moe_gate_up(
    const ttnn::Tensor& hidden, const ttnn::Tensor& num_routed_tokens,
    const ttnn::Tensor& device_expert_mapping, const ttnn::Tensor& routed_tokens, const ttnn::Tensor& gate,
    const std::optional<ttnn::Tensor>& up, std::uint32_t experts_per_token,
    const std::optional<ttnn::Tensor>& output_tensor = std::nullopt,
    const std::optional<tt::tt_metal::MemoryConfig>& memory_config = std::nullopt,
    const std::optional<tt::tt_metal::SubDeviceId>& subdevice_id = std::nullopt,
    const std::optional<DeviceComputeKernelConfig>& compute_kernel_config = std::nullopt);

}  // namespace ttnn::experimental
