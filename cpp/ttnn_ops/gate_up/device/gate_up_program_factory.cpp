#include "gate_up_device_operation.hpp"
#include "ttnn_ops/common/plans.hpp"

namespace ttnn::operations::experimental::moe {
namespace {

using Operation = GateUpDeviceOperation;

const planner::Program& plan_of(const Operation::operation_attributes_t& attributes,
                                const Operation::tensor_args_t& tensors) {
    return plan(tensors.up.has_value() ? "gate_up" : "project", Operation::problem(attributes, tensors),
                machine_of(tensors.hidden));
}

Call call_of(const Operation::operation_attributes_t&, const Operation::tensor_args_t& tensors,
             const Operation::tensor_return_value_t& output) {
    Call call{.tensors = {{"hidden", tensors.hidden},
                          {"num_routed_tokens", tensors.num_routed_tokens},
                          {"device_expert_mapping", tensors.device_expert_mapping},
                          {"routed_tokens", tensors.routed_tokens},
                          {"weight_0", tensors.gate},
                          {"out", output}}};
    if (tensors.up.has_value()) {
        call.tensors.emplace("weight_1", *tensors.up);
    }
    return call;
}

}  // namespace

tt::tt_metal::ProgramDescriptor GateUpDeviceOperation::ProgramFactory::create_descriptor(
    const operation_attributes_t& attributes, const tensor_args_t& tensors, tensor_return_value_t& output) {
    return describe(plan_of(attributes, tensors), call_of(attributes, tensors, output));
}

void GateUpDeviceOperation::ProgramFactory::override_runtime_arguments(
    tt::tt_metal::Program& program, const operation_attributes_t& attributes, const tensor_args_t& tensors,
    tensor_return_value_t& output, const std::optional<ttnn::MeshCoordinate>&) {
    rebind(program, plan_of(attributes, tensors), call_of(attributes, tensors, output));
}

}  // namespace ttnn::operations::experimental::moe
