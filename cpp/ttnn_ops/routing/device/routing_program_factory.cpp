// SPDX-License-Identifier: Apache-2.0
#include "routing_device_operation.hpp"
#include "ttnn_ops/common/checks.hpp"
#include "ttnn_ops/common/plans.hpp"

namespace ttnn::operations::experimental::moe {

const planner::Program& RoutingDeviceOperation::program(const operation_attributes_t& attributes,
                                                        const tensor_args_t& tensors) {
    return plan("routing", problem(attributes, tensors),
                machine_of(tensors.topk_ids, attributes.subdevice_id));
}

Call RoutingDeviceOperation::call(const operation_attributes_t&, const tensor_args_t& tensors,
                                  const tensor_return_value_t& outputs) {
    return {.tensors = {{"topk_ids", tensors.topk_ids},
                        {"topk_weights", tensors.topk_weights},
                        {"device_expert_mapping", tensors.device_expert_mapping},
                        {"num_routed_tokens", outputs[0]},
                        {"routed_tokens", outputs[1]},
                        {"routed_token_weights", outputs[2]}},
            .scalars = {{"T", size_of("topk_ids", tensors.topk_ids, 2, 0)}}};
}

}  // namespace ttnn::operations::experimental::moe
