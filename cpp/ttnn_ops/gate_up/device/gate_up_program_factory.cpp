// SPDX-License-Identifier: Apache-2.0
#include "gate_up_device_operation.hpp"
#include "ttnn_ops/common/plans.hpp"

namespace ttnn::operations::experimental::moe {

const planner::Program& GateUpDeviceOperation::program(const operation_attributes_t& attributes,
                                                       const tensor_args_t& tensors) {
    return plan(tensors.up.has_value() ? "gate_up" : "project", problem(attributes, tensors),
                machine_of(tensors.hidden, attributes.subdevice_id));
}

Call GateUpDeviceOperation::call(const operation_attributes_t&, const tensor_args_t& tensors,
                                 const tensor_return_value_t& output) {
    Call call{.tensors = {{"hidden", tensors.hidden},
                          {"num_routed_tokens", tensors.num_routed_tokens},
                          {"device_expert_mapping", tensors.device_expert_mapping},
                          {"routed_tokens", tensors.routed_tokens},
                          {"weight_0", tensors.gate},
                          {"out", output}}};
    if (tensors.up.has_value()) {
        call.tensors.emplace_back("weight_1", *tensors.up);
    }
    return call;
}

}  // namespace ttnn::operations::experimental::moe
