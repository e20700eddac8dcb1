// SPDX-License-Identifier: Apache-2.0
#include "routing_device_operation.hpp"

#include <tt_stl/assert.hpp>

#include "ttnn/tensor/tensor_ops.hpp"
#include "ttnn_ops/common/checks.hpp"
#include "ttnn_ops/common/plans.hpp"

namespace ttnn::operations::experimental::moe {

using namespace tt::tt_metal;

planner::Problem RoutingDeviceOperation::problem(const operation_attributes_t& attributes,
                                                 const tensor_args_t& tensors) {
    return {.T = attributes.token_bound,
            .E = attributes.num_experts,
            .E_local = size_of("device_expert_mapping", tensors.device_expert_mapping, 2, 1),
            .K = size_of("topk_ids", tensors.topk_ids, 2, 1),
            .H = planner::kTile,  // routing depends on neither H nor I
            .I = planner::kTile};
}

void RoutingDeviceOperation::validate_on_program_cache_miss(const operation_attributes_t& attributes,
                                                            const tensor_args_t& tensors) {
    const planner::Problem sizes = problem(attributes, tensors);
    const std::uint32_t T = size_of("topk_ids", tensors.topk_ids, 2, 0);
    const auto check = [&](const char* name, const ttnn::Tensor& tensor,
                           const std::vector<std::uint32_t>& shape, DataType dtype) {
        check_tensor(name, tensor, shape, {dtype}, Layout::ROW_MAJOR, tensors.topk_ids);
    };
    check("topk_ids", tensors.topk_ids, {T, sizes.K}, DataType::INT32);
    check("topk_weights", tensors.topk_weights, {T, sizes.K}, DataType::FLOAT32);
    check("device_expert_mapping", tensors.device_expert_mapping, {1, sizes.E_local}, DataType::INT32);
    TT_FATAL(T != 0 && T <= sizes.T,
             "T is beyond what the program takes; got {}; expected 1 .. {}; to fix it: a larger token_bound.",
             T, sizes.T);
    check_memory_config(attributes.memory_config);
    if (!tensors.outputs.empty()) {
        TT_FATAL(tensors.outputs.size() == 3, "routing has three outputs; got {}; expected 3, or none.",
                 tensors.outputs.size());
        check("num_routed_tokens", tensors.outputs[0], {1, sizes.E}, DataType::INT32);
        check("routed_tokens", tensors.outputs[1], {sizes.E, planner::padded_tokens(sizes)}, DataType::INT32);
        check("routed_token_weights", tensors.outputs[2], {sizes.E, planner::padded_tokens(sizes)},
              DataType::BFLOAT16);
    }
    program(attributes, tensors);  // throws if there is none
}

RoutingDeviceOperation::spec_return_value_t RoutingDeviceOperation::compute_output_specs(
    const operation_attributes_t& attributes, const tensor_args_t& tensors) {
    const planner::Problem sizes = problem(attributes, tensors);
    const std::uint32_t columns = planner::padded_tokens(sizes);
    return {spec_of({1, sizes.E}, DataType::INT32, Layout::ROW_MAJOR),
            spec_of({sizes.E, columns}, DataType::INT32, Layout::ROW_MAJOR),
            spec_of({sizes.E, columns}, DataType::BFLOAT16, Layout::ROW_MAJOR)};
}

RoutingDeviceOperation::tensor_return_value_t RoutingDeviceOperation::create_output_tensors(
    const operation_attributes_t& attributes, const tensor_args_t& tensors) {
    if (!tensors.outputs.empty()) {
        return tensors.outputs;
    }
    tensor_return_value_t made;
    for (const TensorSpec& spec : compute_output_specs(attributes, tensors)) {
        made.push_back(create_device_tensor(spec, tensors.topk_ids.device()));
    }
    return made;
}

ttsl::hash::hash_t RoutingDeviceOperation::compute_program_hash(const operation_attributes_t& attributes,
                                                                const tensor_args_t& tensors) {
    const planner::Problem sizes = problem(attributes, tensors);
    const std::uint32_t T = size_of("topk_ids", tensors.topk_ids, 2, 0);
    const std::uint32_t columns = planner::padded_tokens(sizes);
    const ttnn::Tensor& beside = tensors.topk_ids;
    const auto output = [&](std::size_t i, std::uint32_t rows, std::uint32_t width, DataType dtype) {
        return key_of(i < tensors.outputs.size() ? &tensors.outputs[i] : nullptr, beside, 0, {rows, width},
                      dtype, Layout::ROW_MAJOR);
    };
    return hash_of<RoutingDeviceOperation>(
        sizes, T == 0 || T > sizes.T, !tensors.outputs.empty() && tensors.outputs.size() != 3,
        key_of(attributes.memory_config), key_of(beside, attributes.subdevice_id),
        key_of(tensors.topk_ids, beside, T), key_of(tensors.topk_weights, beside, T),
        key_of(tensors.device_expert_mapping, beside), output(0, 1, sizes.E, DataType::INT32),
        output(1, sizes.E, columns, DataType::INT32), output(2, sizes.E, columns, DataType::BFLOAT16));
}

}  // namespace ttnn::operations::experimental::moe

namespace ttnn::prim {

std::vector<ttnn::Tensor> moe_routing(const ttnn::Tensor& topk_ids, const ttnn::Tensor& topk_weights,
                                      const ttnn::Tensor& device_expert_mapping, std::uint32_t num_experts,
                                      std::uint32_t token_bound, const std::vector<ttnn::Tensor>& outputs,
                                      const std::optional<tt::tt_metal::MemoryConfig>& memory_config,
                                      const std::optional<tt::tt_metal::SubDeviceId>& subdevice_id) {
    using Operation = operations::experimental::moe::RoutingDeviceOperation;
    return ttnn::device_operation::launch<Operation>(
        Operation::operation_attributes_t{.num_experts = num_experts,
                                          .token_bound = token_bound,
                                          .memory_config = memory_config,
                                          .subdevice_id = subdevice_id},
        Operation::tensor_args_t{.topk_ids = topk_ids,
                                 .topk_weights = topk_weights,
                                 .device_expert_mapping = device_expert_mapping,
                                 .outputs = outputs});
}

}  // namespace ttnn::prim
