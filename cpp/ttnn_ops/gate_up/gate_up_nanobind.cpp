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

Args:
    hidden (ttnn.Tensor): [T, H] bfloat16, row-major.
    num_routed_tokens, device_expert_mapping, routed_tokens: of `moe_routing`; tokens up to its bound.
    gate (ttnn.Tensor): [E_local, H, I] bfloat16 or bfloat8_b, tiles.
    up (ttnn.Tensor, optional): the same.

Keyword Args:
    experts_per_token (int): K.
    output_tensor (ttnn.Tensor, optional): tensor to write to.

Returns:
    ttnn.Tensor: [rows, I] bfloat16, tiles: rows of an expert start at a multiple of 32, in device_expert_mapping order.

Raises:
    RuntimeError: shapes, dtypes, layouts, places or sizes that do not fit.
)doc";
    module.def("moe_gate_up", &ttnn::experimental::moe_gate_up, nb::arg("hidden").noconvert(),
               nb::arg("num_routed_tokens").noconvert(), nb::arg("device_expert_mapping").noconvert(),
               nb::arg("routed_tokens").noconvert(), nb::arg("gate").noconvert(), nb::arg("up") = nb::none(),
               nb::kw_only(), nb::arg("experts_per_token"), nb::arg("output_tensor") = nb::none(),
               nb::call_guard<nb::gil_scoped_release>(), doc);
}

}  // namespace ttnn::operations::experimental::moe
