// SPDX-License-Identifier: Apache-2.0
#include "down_device_operation.hpp"
#include "ttnn_ops/common/plans.hpp"

namespace ttnn::operations::experimental::moe {

const planner::Program& DownDeviceOperation::program(const operation_attributes_t& attributes,
                                                     const tensor_args_t& tensors) {
    return plan("down", problem(attributes, tensors),
                machine_of(tensors.activations, attributes.subdevice_id));
}

Call DownDeviceOperation::call(const operation_attributes_t& attributes, const tensor_args_t& tensors,
                               const tensor_return_value_t& output) {
    const auto token_tiles =
        static_cast<std::uint32_t>(planner::ceil_div(attributes.num_tokens, planner::kTile));
    return {.tensors = {{"activations", tensors.activations},
                        {"num_routed_tokens", tensors.num_routed_tokens},
                        {"device_expert_mapping", tensors.device_expert_mapping},
                        {"routed_tokens", tensors.routed_tokens},
                        {"routed_token_weights", tensors.routed_token_weights},
                        {"weight_0", tensors.weight},
                        {"out", output}},
            .scalars = {{"token_tiles", token_tiles}, {"accumulate", attributes.accumulate ? 1u : 0u}}};
}

}  // namespace ttnn::operations::experimental::moe
