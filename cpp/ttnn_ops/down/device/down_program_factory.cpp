#include "down_device_operation.hpp"
#include "ttnn_ops/common/plans.hpp"

namespace ttnn::operations::experimental::moe {
namespace {

using Operation = DownDeviceOperation;

const planner::Program& plan_of(const Operation::operation_attributes_t& attributes,
                                const Operation::tensor_args_t& tensors) {
    return plan("down", Operation::problem(attributes, tensors), machine_of(tensors.activations));
}

Call call_of(const Operation::operation_attributes_t& attributes, const Operation::tensor_args_t& tensors,
             const Operation::tensor_return_value_t& output) {
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

}  // namespace

tt::tt_metal::ProgramDescriptor DownDeviceOperation::ProgramFactory::create_descriptor(
    const operation_attributes_t& attributes, const tensor_args_t& tensors, tensor_return_value_t& output) {
    return describe(plan_of(attributes, tensors), call_of(attributes, tensors, output));
}

void DownDeviceOperation::ProgramFactory::override_runtime_arguments(
    tt::tt_metal::Program& program, const operation_attributes_t& attributes, const tensor_args_t& tensors,
    tensor_return_value_t& output, const std::optional<ttnn::MeshCoordinate>&) {
    rebind(program, plan_of(attributes, tensors), call_of(attributes, tensors, output));
}

}  // namespace ttnn::operations::experimental::moe
