// SPDX-License-Identifier: Apache-2.0
#include "routing_nanobind.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include "routing.hpp"

namespace ttnn::operations::experimental::moe {

namespace nb = nanobind;

void bind_routing(nb::module_& module) {
    const char* doc = R"doc(
For each expert, the tokens that go to it and their weights, from the experts of each token.

Any partition of the experts among the devices of a mesh; tensors are replicated but for device_expert_mapping. An id
outside 0 .. num_experts - 1 names no expert; the weights of an expert that a token names twice are added in float32.

Args:
    topk_ids (ttnn.Tensor): [T, K] int32, row-major: global experts of each token.
    topk_weights (ttnn.Tensor): [T, K] float32, row-major.
    device_expert_mapping (ttnn.Tensor): [1, E_local] int32, row-major: global index of each expert of the device.

Keyword Args:
    num_experts (int): E, of all devices.
    token_bound (int, optional): most tokens that the program serves; default: T rounded up to a power of two from 32.
    output_tensors (tuple, optional): tensors to write to.
    memory_config (ttnn.MemoryConfig, optional): of the output; DRAM_MEMORY_CONFIG is the only one.
    subdevice_id (ttnn.SubDeviceId, optional): sub-device to run on; default: the whole compute grid.

Returns:
    tuple: num_routed_tokens [1, E] int32, routed_tokens [E, bound] int32, routed_token_weights [E, bound] bfloat16,
    row-major. Rows hold what num_routed_tokens says; the rest is undefined.

Raises:
    RuntimeError: shapes, dtypes, layouts, places, sizes or configs that do not fit.
)doc";
    module.def("moe_routing", &ttnn::experimental::moe_routing, nb::arg("topk_ids").noconvert(),
               nb::arg("topk_weights").noconvert(), nb::arg("device_expert_mapping").noconvert(),
               nb::kw_only(), nb::arg("num_experts"), nb::arg("token_bound") = nb::none(),
               nb::arg("output_tensors") = nb::none(), nb::arg("memory_config") = nb::none(),
               nb::arg("subdevice_id") = nb::none(), nb::call_guard<nb::gil_scoped_release>(), doc);
}

}  // namespace ttnn::operations::experimental::moe
