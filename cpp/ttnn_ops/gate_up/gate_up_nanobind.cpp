// SPDX-License-Identifier: Apache-2.0
#include "gate_up_nanobind.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include "gate_up.hpp"

namespace ttnn::operations::experimental::moe {

namespace nb = nanobind;

void bind_gate_up(nb::module_& module) {
    const char* doc = R"doc(
silu(hidden gate) * (hidden up) of the rows of each expert; without up, hidden gate.

Sums are float32, and so are SiLU and product on them; one rounding to bfloat16.

Precondition, which no check sees: the values of the routing's tensors are those of `moe_routing`, or keep its rules.
The first num_routed_tokens[0, e] of routed_tokens[e] are distinct and in 0 .. T - 1. device_expert_mapping names an
expert once. All counts of the device add up to T * K at most. Other values make kernels access memory outside of the
tensors.

Tiles in bank order: the tiles of a device's weight are a line, expert by expert, column by column, k by k. Runs of that
line lie side by side in one DRAM bank, and the next run in the next bank: 4 tiles of bfloat16, 7 of bfloat8_b or 14 of
bfloat4_b. The last tiles, too few for a run in every bank, lie one a bank. in_bank_order of
ttnn_moe/tenstorrent/weights.py makes that order, and the line's shape: [E_local, N / 32, K, 32] of matrices [K, N]. The
matrices themselves, [E_local, K, N], are refused.

Args:
    hidden (ttnn.Tensor): [T, H] bfloat16, row-major.
    num_routed_tokens, device_expert_mapping, routed_tokens: of `moe_routing`; tokens up to its bound. A routed_tokens
        [E, bound] of a caller has a multiple of 32 columns.
    gate (ttnn.Tensor): [E_local, I / 32, H, 32] bfloat16, bfloat8_b or bfloat4_b, tiles in bank order, as above.
    up (ttnn.Tensor, optional): the same.

Keyword Args:
    experts_per_token (int): K.
    output_tensor (ttnn.Tensor, optional): tensor to write to.
    memory_config (ttnn.MemoryConfig, optional): of the output; DRAM_MEMORY_CONFIG is the only one.
    subdevice_id (ttnn.SubDeviceId, optional): sub-device to run on; default: the whole compute grid.
    compute_kernel_config (ttnn.DeviceComputeKernelConfig, optional): math_fidelity and fp32_dest_acc_en of the
        products. Default: fp32 sums; HiFi4 for bfloat16 weights, HiFi3 for bfloat8_b and bfloat4_b.

Returns:
    ttnn.Tensor: [rows, I] bfloat16, tiles: rows of an expert start at a multiple of 32, in device_expert_mapping order.

Raises:
    RuntimeError: shapes, dtypes, layouts, places, sizes or configs that do not fit.
)doc";
    module.def("moe_gate_up", &ttnn::experimental::moe_gate_up, nb::arg("hidden").noconvert(),
               nb::arg("num_routed_tokens").noconvert(), nb::arg("device_expert_mapping").noconvert(),
               nb::arg("routed_tokens").noconvert(), nb::arg("gate").noconvert(), nb::arg("up") = nb::none(),
               nb::kw_only(), nb::arg("experts_per_token"), nb::arg("output_tensor") = nb::none(),
               nb::arg("memory_config") = nb::none(), nb::arg("subdevice_id") = nb::none(),
               nb::arg("compute_kernel_config") = nb::none(), nb::call_guard<nb::gil_scoped_release>(), doc);
}

}  // namespace ttnn::operations::experimental::moe
