// SPDX-License-Identifier: Apache-2.0
#include "ttnn_ops/common/compute_config.hpp"

#include <algorithm>
#include <array>
#include <string_view>
#include <tt_stl/assert.hpp>
#include <utility>

namespace ttnn::operations::experimental::moe {

using tt::tt_metal::MathFidelity;

namespace {

constexpr std::array<std::pair<std::string_view, MathFidelity>, 4> kFidelities{{
    {"LoFi", MathFidelity::LoFi},
    {"HiFi2", MathFidelity::HiFi2},
    {"HiFi3", MathFidelity::HiFi3},
    {"HiFi4", MathFidelity::HiFi4},
}};

}  // namespace

void check_compute_config(const std::optional<DeviceComputeKernelConfig>& config) {
    if (!config.has_value()) {
        return;
    }
    TT_FATAL(
        std::ranges::find(kFidelities, config->math_fidelity, [](const auto& one) { return one.second; }) !=
            kFidelities.end(),
        "compute_kernel_config has an unknown math_fidelity; got another; expected LoFi, HiFi2, HiFi3 or "
        "HiFi4.");
    TT_FATAL(
        !config->packer_l1_acc,
        "compute_kernel_config asks for packer_l1_acc, which the kernels do not have; got true; expected "
        "false.");
    TT_FATAL(!config->dst_full_sync_en,
             "compute_kernel_config asks for dst_full_sync_en, which the kernels do not have; got true; "
             "expected false.");
}

std::uint64_t key_of(const std::optional<DeviceComputeKernelConfig>& config) {
    if (!config.has_value()) {
        return 0;
    }
    return 1 | (config->fp32_dest_acc_en ? 2 : 0) | (config->packer_l1_acc ? 4 : 0) |
           (config->dst_full_sync_en ? 8 : 0) | (static_cast<std::uint64_t>(config->math_fidelity) << 4);
}

std::string fidelity_of(const std::optional<DeviceComputeKernelConfig>& config) {
    for (const auto& [name, fidelity] : kFidelities) {
        if (config.has_value() && config->math_fidelity == fidelity) {
            return std::string(name);
        }
    }
    return "";
}

MathFidelity fidelity_of(const std::string& name) {
    for (const auto& [known, fidelity] : kFidelities) {
        if (known == name) {
            return fidelity;
        }
    }
    TT_THROW("a plan has an unknown math fidelity; got {}; expected LoFi, HiFi2, HiFi3 or HiFi4.", name);
}

bool fp32_dest_of(const std::optional<DeviceComputeKernelConfig>& config) {
    return !config.has_value() || config->fp32_dest_acc_en;
}

}  // namespace ttnn::operations::experimental::moe
