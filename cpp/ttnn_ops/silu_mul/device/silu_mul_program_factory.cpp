// SPDX-License-Identifier: Apache-2.0
#include "silu_mul_device_operation.hpp"
#include "ttnn_ops/common/plans.hpp"

namespace ttnn::operations::experimental::moe {

const planner::Program& SiluMulDeviceOperation::program(const operation_attributes_t& attributes,
                                                        const tensor_args_t& tensors) {
    return plan("silu_mul", problem(attributes, tensors), machine_of(tensors.gate, attributes.subdevice_id));
}

Call SiluMulDeviceOperation::call(const operation_attributes_t&, const tensor_args_t& tensors,
                                  const tensor_return_value_t& output) {
    return {.tensors = {{"gate", tensors.gate}, {"up", tensors.up}, {"out", output}}};
}

}  // namespace ttnn::operations::experimental::moe
