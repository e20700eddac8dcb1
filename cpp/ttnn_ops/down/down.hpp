// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <tt-metalium/sub_device_types.hpp>

#include "ttnn/operations/core/compute_kernel/compute_kernel_config.hpp"
#include "ttnn/tensor/tensor.hpp"

namespace ttnn::experimental {

// Each row of an expert times its down weights times its routing weight, summed over the rows of a token.
// output_dtype: by default that of output_tensor, else bfloat16.
ttnn::Tensor moe_down(const ttnn::Tensor& activations, const ttnn::Tensor& num_routed_tokens,
                      const ttnn::Tensor& device_expert_mapping, const ttnn::Tensor& routed_tokens,
                      const ttnn::Tensor& routed_token_weights, const ttnn::Tensor& weight,
                      std::uint32_t experts_per_token, std::uint32_t num_tokens,
                      std::optional<tt::tt_metal::DataType> output_dtype = std::nullopt,
                      bool accumulate = false,
                      const std::optional<ttnn::Tensor>& output_tensor = std::nullopt,
                      const std::optional<tt::tt_metal::MemoryConfig>& memory_config = std::nullopt,
                      const std::optional<tt::tt_metal::SubDeviceId>& subdevice_id = std::nullopt,
                      const std::optional<DeviceComputeKernelConfig>& compute_kernel_config = std::nullopt);

}  // namespace ttnn::experimental
