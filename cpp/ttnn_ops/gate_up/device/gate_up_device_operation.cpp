// SPDX-License-Identifier: Apache-2.0
#include "gate_up_device_operation.hpp"

#include <tt_stl/assert.hpp>

#include "ttnn/tensor/tensor_ops.hpp"
#include "ttnn_ops/common/checks.hpp"
#include "ttnn_ops/common/compute_config.hpp"
#include "ttnn_ops/common/plans.hpp"

namespace ttnn::operations::experimental::moe {

using namespace tt::tt_metal;

planner::Problem GateUpDeviceOperation::problem(const operation_attributes_t& attributes,
                                                const tensor_args_t& tensors) {
    return {.T = size_of("routed_tokens", tensors.routed_tokens, 2, 1),
            .E = size_of("num_routed_tokens", tensors.num_routed_tokens, 2, 1),
            .E_local = size_of("device_expert_mapping", tensors.device_expert_mapping, 2, 1),
            .K = attributes.experts_per_token,
            .H = size_of("hidden", tensors.hidden, 2, 1),
            .I = weight_columns("gate", tensors.gate),
            .weight_format = name_of(tensors.gate.dtype()),
            .math_fidelity = fidelity_of(attributes.compute_kernel_config),
            .fp32_dest = fp32_dest_of(attributes.compute_kernel_config)};
}

void GateUpDeviceOperation::validate_on_program_cache_miss(const operation_attributes_t& attributes,
                                                           const tensor_args_t& tensors) {
    const planner::Problem sizes = problem(attributes, tensors);
    const std::uint32_t T = size_of("hidden", tensors.hidden, 2, 0);
    const auto check = [&](const char* name, const ttnn::Tensor& tensor,
                           const std::vector<std::uint32_t>& shape, const std::vector<DataType>& dtypes,
                           Layout layout) {
        check_tensor(name, tensor, shape, dtypes, layout, tensors.hidden);
    };
    check("hidden", tensors.hidden, {T, sizes.H}, {DataType::BFLOAT16}, Layout::ROW_MAJOR);
    check_routing(sizes, tensors.num_routed_tokens, tensors.device_expert_mapping, tensors.routed_tokens,
                  tensors.hidden);
    const auto check_matrix = [&](const char* name, const ttnn::Tensor& weight,
                                  const std::vector<DataType>& dtypes) {
        check_weight(name, weight, sizes.E_local, sizes.H, sizes.I, dtypes, tensors.hidden);
    };
    check_matrix("gate", tensors.gate, weight_dtypes());
    if (tensors.up.has_value()) {
        check_matrix("up", *tensors.up, {tensors.gate.dtype()});
    }
    if (tensors.output.has_value()) {
        check("output", *tensors.output, {rows_of(sizes), sizes.I}, {DataType::BFLOAT16}, Layout::TILE);
    }
    TT_FATAL(T != 0 && T <= sizes.T, "T is beyond what the routing was made for; got {}; expected 1 .. {}.",
             T, sizes.T);
    check_memory_config(attributes.memory_config);
    check_compute_config(attributes.compute_kernel_config);
    program(attributes, tensors);  // throws if there is none
}

GateUpDeviceOperation::spec_return_value_t GateUpDeviceOperation::compute_output_specs(
    const operation_attributes_t& attributes, const tensor_args_t& tensors) {
    const planner::Problem sizes = problem(attributes, tensors);
    return spec_of({rows_of(sizes), sizes.I}, DataType::BFLOAT16, Layout::TILE);
}

GateUpDeviceOperation::tensor_return_value_t GateUpDeviceOperation::create_output_tensors(
    const operation_attributes_t& attributes, const tensor_args_t& tensors) {
    if (tensors.output.has_value()) {
        return *tensors.output;
    }
    return create_device_tensor(compute_output_specs(attributes, tensors), tensors.hidden.device());
}

ttsl::hash::hash_t GateUpDeviceOperation::compute_program_hash(const operation_attributes_t& attributes,
                                                               const tensor_args_t& tensors) {
    const planner::Problem sizes = problem(attributes, tensors);
    const std::uint32_t T = size_of("hidden", tensors.hidden, 2, 0);
    const ttnn::Tensor& beside = tensors.hidden;
    return hash_of<GateUpDeviceOperation>(
        sizes, T == 0 || T > sizes.T, key_of(attributes.memory_config),
        key_of(beside, attributes.subdevice_id), key_of(attributes.compute_kernel_config),
        key_of(tensors.hidden, beside, T), key_of(tensors.num_routed_tokens, beside),
        key_of(tensors.device_expert_mapping, beside), key_of(tensors.routed_tokens, beside),
        key_of(tensors.gate, beside), tensors.up.has_value() ? key_of(*tensors.up, beside) : 0,
        key_of(tensors.output.has_value() ? &*tensors.output : nullptr, beside, 0, {rows_of(sizes), sizes.I},
               DataType::BFLOAT16, Layout::TILE));
}

}  // namespace ttnn::operations::experimental::moe

namespace ttnn::prim {

ttnn::Tensor moe_gate_up(const ttnn::Tensor& hidden, const ttnn::Tensor& num_routed_tokens,
                         const ttnn::Tensor& device_expert_mapping, const ttnn::Tensor& routed_tokens,
                         const ttnn::Tensor& gate, const std::optional<ttnn::Tensor>& up,
                         std::uint32_t experts_per_token, const std::optional<ttnn::Tensor>& output,
                         const std::optional<tt::tt_metal::MemoryConfig>& memory_config,
                         const std::optional<tt::tt_metal::SubDeviceId>& subdevice_id,
                         const std::optional<DeviceComputeKernelConfig>& compute_kernel_config) {
    using Operation = operations::experimental::moe::GateUpDeviceOperation;
    return ttnn::device_operation::launch<Operation>(
        Operation::operation_attributes_t{.experts_per_token = experts_per_token,
                                          .memory_config = memory_config,
                                          .subdevice_id = subdevice_id,
                                          .compute_kernel_config = compute_kernel_config},
        Operation::tensor_args_t{.hidden = hidden,
                                 .num_routed_tokens = num_routed_tokens,
                                 .device_expert_mapping = device_expert_mapping,
                                 .routed_tokens = routed_tokens,
                                 .gate = gate,
                                 .up = up,
                                 .output = output});
}

}  // namespace ttnn::prim
