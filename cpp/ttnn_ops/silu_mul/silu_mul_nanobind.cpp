// SPDX-License-Identifier: Apache-2.0
#include "silu_mul_nanobind.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include "silu_mul.hpp"

namespace ttnn::operations::experimental::moe {

namespace nb = nanobind;

void bind_silu_mul(nb::module_& module) {
    const char* doc = R"doc(
silu(gate) * up, in float32, over all rows of two step tensors.

Args:
    gate, up (ttnn.Tensor): [rows, I] bfloat16, tiles; rows and I are multiples of 32.

Keyword Args:
    output_tensor (ttnn.Tensor, optional): tensor to write to.
    memory_config (ttnn.MemoryConfig, optional): of the output; DRAM_MEMORY_CONFIG is the only one.
    subdevice_id (ttnn.SubDeviceId, optional): sub-device to run on; default: the whole compute grid.

Returns:
    ttnn.Tensor: [rows, I] bfloat16, tiles.

Raises:
    RuntimeError: shapes, dtypes, layouts, places or configs that do not fit.
)doc";
    module.def("moe_silu_mul", &ttnn::experimental::moe_silu_mul, nb::arg("gate").noconvert(),
               nb::arg("up").noconvert(), nb::kw_only(), nb::arg("output_tensor") = nb::none(),
               nb::arg("memory_config") = nb::none(), nb::arg("subdevice_id") = nb::none(),
               nb::call_guard<nb::gil_scoped_release>(), doc);
}

}  // namespace ttnn::operations::experimental::moe
