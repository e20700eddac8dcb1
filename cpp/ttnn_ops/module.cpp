// SPDX-License-Identifier: Apache-2.0
// ttnn_moe._ttnn_ops: the operators as functions on ttnn tensors. Tensors' type is the one that ttnn itself
// binds.

#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>

#include <filesystem>

#include "ttnn_ops/common/descriptor.hpp"
#include "ttnn_ops/down/down_nanobind.hpp"
#include "ttnn_ops/gate_up/gate_up_nanobind.hpp"
#include "ttnn_ops/routing/routing_nanobind.hpp"
#include "ttnn_ops/silu_mul/silu_mul_nanobind.hpp"

namespace nb = nanobind;
namespace moe = ttnn::operations::experimental::moe;

NB_MODULE(_ttnn_ops, module) {
    nb::module_::import_("ttnn");
    const auto kernels = nb::module_::import_("ttnn_moe.sources").attr("kernel_path")("device_kernels");
    moe::set_kernel_root(nb::cast<std::filesystem::path>(kernels));
    moe::bind_routing(module);
    moe::bind_gate_up(module);
    moe::bind_silu_mul(module);
    moe::bind_down(module);
}
