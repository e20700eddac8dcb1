// SPDX-License-Identifier: Apache-2.0
#include "down_nanobind.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include "down.hpp"

namespace ttnn::operations::experimental::moe {

namespace nb = nanobind;

void bind_down(nb::module_& module) {
    const char* doc = R"doc(
Each row of an expert times its down weights times its routing weight, summed over the rows of a token.

Sums are float32, in device_expert_mapping order: the same bits every time. On a mesh, the device's part of the sum.

Precondition, which no check sees: the values of the routing's tensors are those of `moe_routing`, or keep its rules;
see `moe_gate_up`. Tokens are below num_tokens. Other values make kernels access memory outside of the tensors.

Tiles in bank order: the tiles of a device's weight are a line, expert by expert, column by column, k by k. Runs of that
line lie side by side in one DRAM bank, and the next run in the next bank: 4 tiles of bfloat16, 7 of bfloat8_b or 14 of
bfloat4_b. The last tiles, too few for a run in every bank, lie one a bank. in_bank_order of
ttnn_moe/tenstorrent/weights.py makes that order, and the line's shape: [E_local, N / 32, K, 32] of matrices [K, N]. The
matrices themselves, [E_local, K, N], are refused.

Args:
    activations (ttnn.Tensor): [rows, I] bfloat16, tiles: of `moe_gate_up`.
    num_routed_tokens, device_expert_mapping, routed_tokens: of `moe_routing`.
    routed_token_weights (ttnn.Tensor): of `moe_routing`.
    weight (ttnn.Tensor): [E_local, H / 32, I, 32] bfloat16, bfloat8_b or bfloat4_b, tiles in bank order, as above.

Keyword Args:
    experts_per_token (int): K.
    num_tokens (int): T, up to the routing's bound.
    output_dtype (ttnn.DataType, optional): bfloat16 or float32; default: that of output_tensor, else bfloat16.
    accumulate (bool): add to output_tensor instead of overwriting it.
    output_tensor (ttnn.Tensor, optional): [T, H], tiles, to write to.
    memory_config (ttnn.MemoryConfig, optional): of the output; DRAM_MEMORY_CONFIG is the only one.
    subdevice_id (ttnn.SubDeviceId, optional): sub-device to run on; default: the whole compute grid.
    compute_kernel_config (ttnn.DeviceComputeKernelConfig, optional): math_fidelity and fp32_dest_acc_en of the
        products. Default: fp32 sums; HiFi4 for bfloat16 weights, HiFi3 for bfloat8_b and bfloat4_b.

Returns:
    ttnn.Tensor: [T, H], tiles.

Raises:
    RuntimeError: shapes, dtypes, layouts, places, sizes or configs that do not fit.
)doc";
    module.def("moe_down", &ttnn::experimental::moe_down, nb::arg("activations").noconvert(),
               nb::arg("num_routed_tokens").noconvert(), nb::arg("device_expert_mapping").noconvert(),
               nb::arg("routed_tokens").noconvert(), nb::arg("routed_token_weights").noconvert(),
               nb::arg("weight").noconvert(), nb::kw_only(), nb::arg("experts_per_token"),
               nb::arg("num_tokens"), nb::arg("output_dtype") = nb::none(), nb::arg("accumulate") = false,
               nb::arg("output_tensor") = nb::none(), nb::arg("memory_config") = nb::none(),
               nb::arg("subdevice_id") = nb::none(), nb::arg("compute_kernel_config") = nb::none(),
               nb::call_guard<nb::gil_scoped_release>(), doc);
}

}  // namespace ttnn::operations::experimental::moe
