#include "routing_device_operation.hpp"
#include "ttnn_ops/common/checks.hpp"
#include "ttnn_ops/common/plans.hpp"

namespace ttnn::operations::experimental::moe {
namespace {

using Operation = RoutingDeviceOperation;

const planner::Program& plan_of(const Operation::operation_attributes_t& attributes,
                                const Operation::tensor_args_t& tensors) {
    return plan("routing", Operation::problem(attributes, tensors), machine_of(tensors.topk_ids));
}

Call call_of(const Operation::operation_attributes_t&, const Operation::tensor_args_t& tensors,
             const Operation::tensor_return_value_t& outputs) {
    return {.tensors = {{"topk_ids", tensors.topk_ids},
                        {"topk_weights", tensors.topk_weights},
                        {"device_expert_mapping", tensors.device_expert_mapping},
                        {"num_routed_tokens", outputs[0]},
                        {"routed_tokens", outputs[1]},
                        {"routed_token_weights", outputs[2]}},
            .scalars = {{"T", sizes_of("topk_ids", tensors.topk_ids, 2)[0]}}};
}

}  // namespace

tt::tt_metal::ProgramDescriptor RoutingDeviceOperation::ProgramFactory::create_descriptor(
    const operation_attributes_t& attributes, const tensor_args_t& tensors, tensor_return_value_t& output) {
    return describe(plan_of(attributes, tensors), call_of(attributes, tensors, output));
}

void RoutingDeviceOperation::ProgramFactory::override_runtime_arguments(
    tt::tt_metal::Program& program, const operation_attributes_t& attributes, const tensor_args_t& tensors,
    tensor_return_value_t& output, const std::optional<ttnn::MeshCoordinate>&) {
    rebind(program, plan_of(attributes, tensors), call_of(attributes, tensors, output));
}

}  // namespace ttnn::operations::experimental::moe
