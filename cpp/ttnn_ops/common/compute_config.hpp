// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tt-metalium/program_descriptors.hpp>

#include "ttnn/operations/core/compute_kernel/compute_kernel_config.hpp"

namespace ttnn::operations::experimental::moe {

// How products with the experts' weights are made. math_fidelity and fp32_dest_acc_en hold. math_approx_mode
// permits approximations, and the kernels make none. Throws for what the kernels do not have: packer_l1_acc,
// dst_full_sync_en.
void check_compute_config(const std::optional<DeviceComputeKernelConfig>& config);
std::uint64_t key_of(const std::optional<DeviceComputeKernelConfig>& config);

// The planner's name of a fidelity; empty, by the weights' format, where there is no config.
std::string fidelity_of(const std::optional<DeviceComputeKernelConfig>& config);
tt::tt_metal::MathFidelity fidelity_of(const std::string& name);

// Whether DST holds fp32: true where there is no config.
bool fp32_dest_of(const std::optional<DeviceComputeKernelConfig>& config);

}  // namespace ttnn::operations::experimental::moe
