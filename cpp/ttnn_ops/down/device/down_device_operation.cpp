// SPDX-License-Identifier: Apache-2.0
#include "down_device_operation.hpp"

#include <tt_stl/assert.hpp>

#include "ttnn/tensor/tensor_ops.hpp"
#include "ttnn_ops/common/checks.hpp"
#include "ttnn_ops/common/compute_config.hpp"
#include "ttnn_ops/common/plans.hpp"

namespace ttnn::operations::experimental::moe {

using namespace tt::tt_metal;

planner::Problem DownDeviceOperation::problem(const operation_attributes_t& attributes,
                                              const tensor_args_t& tensors) {
    return {.T = size_of("routed_tokens", tensors.routed_tokens, 2, 1),
            .E = size_of("num_routed_tokens", tensors.num_routed_tokens, 2, 1),
            .E_local = size_of("device_expert_mapping", tensors.device_expert_mapping, 2, 1),
            .K = attributes.experts_per_token,
            .H = weight_columns("weight", tensors.weight),
            .I = size_of("activations", tensors.activations, 2, 1),
            .weight_format = name_of(tensors.weight.dtype()),
            .out_format = name_of(attributes.output_dtype),
            .math_fidelity = fidelity_of(attributes.compute_kernel_config),
            .fp32_dest = fp32_dest_of(attributes.compute_kernel_config)};
}

void DownDeviceOperation::validate_on_program_cache_miss(const operation_attributes_t& attributes,
                                                         const tensor_args_t& tensors) {
    const planner::Problem sizes = problem(attributes, tensors);
    const std::uint32_t T = attributes.num_tokens;
    const auto check = [&](const char* name, const ttnn::Tensor& tensor,
                           const std::vector<std::uint32_t>& shape, const std::vector<DataType>& dtypes) {
        check_tensor(name, tensor, shape, dtypes, Layout::TILE, tensors.activations);
    };
    check_routing(sizes, tensors.num_routed_tokens, tensors.device_expert_mapping, tensors.routed_tokens,
                  tensors.activations);
    check("activations", tensors.activations, {rows_of(sizes), sizes.I}, {DataType::BFLOAT16});
    check_tensor("routed_token_weights", tensors.routed_token_weights, {sizes.E, sizes.T},
                 {DataType::BFLOAT16}, Layout::ROW_MAJOR, tensors.activations);
    check_weight("weight", tensors.weight, sizes.E_local, sizes.I, sizes.H, weight_dtypes(),
                 tensors.activations);
    TT_FATAL(T != 0 && T <= sizes.T, "T is beyond what the routing was made for; got {}; expected 1 .. {}.",
             T, sizes.T);
    if (tensors.output.has_value()) {
        check("output", *tensors.output, {T, sizes.H}, {attributes.output_dtype});
    }
    TT_FATAL(tensors.output.has_value() || !attributes.accumulate,
             "accumulate needs an output to add to; got none; expected an output tensor.");
    check_memory_config(attributes.memory_config);
    check_compute_config(attributes.compute_kernel_config);
    program(attributes, tensors);  // throws if there is none
}

DownDeviceOperation::spec_return_value_t DownDeviceOperation::compute_output_specs(
    const operation_attributes_t& attributes, const tensor_args_t& tensors) {
    const planner::Problem sizes = problem(attributes, tensors);
    return spec_of({attributes.num_tokens, sizes.H}, attributes.output_dtype, Layout::TILE);
}

DownDeviceOperation::tensor_return_value_t DownDeviceOperation::create_output_tensors(
    const operation_attributes_t& attributes, const tensor_args_t& tensors) {
    if (tensors.output.has_value()) {
        return *tensors.output;
    }
    return create_device_tensor(compute_output_specs(attributes, tensors), tensors.activations.device());
}

ttsl::hash::hash_t DownDeviceOperation::compute_program_hash(const operation_attributes_t& attributes,
                                                             const tensor_args_t& tensors) {
    const planner::Problem sizes = problem(attributes, tensors);
    const std::uint32_t T = attributes.num_tokens;
    const ttnn::Tensor& beside = tensors.activations;
    return hash_of<DownDeviceOperation>(
        sizes, T == 0 || T > sizes.T, attributes.accumulate && !tensors.output.has_value(),
        key_of(attributes.memory_config), key_of(beside, attributes.subdevice_id),
        key_of(attributes.compute_kernel_config), key_of(tensors.activations, beside),
        key_of(tensors.num_routed_tokens, beside), key_of(tensors.device_expert_mapping, beside),
        key_of(tensors.routed_tokens, beside), key_of(tensors.routed_token_weights, beside),
        key_of(tensors.weight, beside),
        key_of(tensors.output.has_value() ? &*tensors.output : nullptr, beside, T, {T, sizes.H},
               attributes.output_dtype, Layout::TILE));
}

}  // namespace ttnn::operations::experimental::moe

namespace ttnn::prim {

ttnn::Tensor moe_down(const ttnn::Tensor& activations, const ttnn::Tensor& num_routed_tokens,
                      const ttnn::Tensor& device_expert_mapping, const ttnn::Tensor& routed_tokens,
                      const ttnn::Tensor& routed_token_weights, const ttnn::Tensor& weight,
                      std::uint32_t experts_per_token, std::uint32_t num_tokens,
                      tt::tt_metal::DataType output_dtype, bool accumulate,
                      const std::optional<ttnn::Tensor>& output,
                      const std::optional<tt::tt_metal::MemoryConfig>& memory_config,
                      const std::optional<tt::tt_metal::SubDeviceId>& subdevice_id,
                      const std::optional<DeviceComputeKernelConfig>& compute_kernel_config) {
    using Operation = operations::experimental::moe::DownDeviceOperation;
    return ttnn::device_operation::launch<Operation>(
        Operation::operation_attributes_t{.experts_per_token = experts_per_token,
                                          .num_tokens = num_tokens,
                                          .output_dtype = output_dtype,
                                          .accumulate = accumulate,
                                          .memory_config = memory_config,
                                          .subdevice_id = subdevice_id,
                                          .compute_kernel_config = compute_kernel_config},
        Operation::tensor_args_t{.activations = activations,
                                 .num_routed_tokens = num_routed_tokens,
                                 .device_expert_mapping = device_expert_mapping,
                                 .routed_tokens = routed_tokens,
                                 .routed_token_weights = routed_token_weights,
                                 .weight = weight,
                                 .output = output});
}

}  // namespace ttnn::prim
