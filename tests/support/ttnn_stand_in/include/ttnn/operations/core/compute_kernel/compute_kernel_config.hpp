// SPDX-License-Identifier: Apache-2.0
// Stand-in: of ttnn's header only what cpp/ttnn_ops uses.
#pragma once

#include "tt-metalium/program_descriptors.hpp"

namespace ttnn {

struct ComputeKernelConfig {
    tt::tt_metal::MathFidelity math_fidelity = tt::tt_metal::MathFidelity::LoFi;
    bool math_approx_mode = true;
    bool fp32_dest_acc_en = false;
    bool packer_l1_acc = false;
    bool dst_full_sync_en = false;
};
using DeviceComputeKernelConfig = ComputeKernelConfig;

}  // namespace ttnn
