#include "silu_mul_device_operation.hpp"
#include "ttnn_ops/common/plans.hpp"

namespace ttnn::operations::experimental::moe {
namespace {

using Operation = SiluMulDeviceOperation;

const planner::Program& plan_of(const Operation::operation_attributes_t& attributes,
                                const Operation::tensor_args_t& tensors) {
    return plan("silu_mul", Operation::problem(attributes, tensors), machine_of(tensors.gate));
}

Call call_of(const Operation::operation_attributes_t&, const Operation::tensor_args_t& tensors,
             const Operation::tensor_return_value_t& output) {
    return {.tensors = {{"gate", tensors.gate}, {"up", tensors.up}, {"out", output}}};
}

}  // namespace

tt::tt_metal::ProgramDescriptor SiluMulDeviceOperation::ProgramFactory::create_descriptor(
    const operation_attributes_t& attributes, const tensor_args_t& tensors, tensor_return_value_t& output) {
    return describe(plan_of(attributes, tensors), call_of(attributes, tensors, output));
}

void SiluMulDeviceOperation::ProgramFactory::override_runtime_arguments(
    tt::tt_metal::Program& program, const operation_attributes_t& attributes, const tensor_args_t& tensors,
    tensor_return_value_t& output, const std::optional<ttnn::MeshCoordinate>&) {
    rebind(program, plan_of(attributes, tensors), call_of(attributes, tensors, output));
}

}  // namespace ttnn::operations::experimental::moe
