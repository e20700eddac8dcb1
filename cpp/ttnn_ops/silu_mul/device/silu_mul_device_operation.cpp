// SPDX-License-Identifier: Apache-2.0
#include "silu_mul_device_operation.hpp"

#include <tt_stl/assert.hpp>

#include "ttnn/tensor/tensor_ops.hpp"
#include "ttnn_ops/common/checks.hpp"
#include "ttnn_ops/common/plans.hpp"

namespace ttnn::operations::experimental::moe {

using namespace tt::tt_metal;

planner::Problem SiluMulDeviceOperation::problem(const operation_attributes_t&,
                                                 const tensor_args_t& tensors) {
    const auto size = [&](std::size_t i) { return size_of("gate", tensors.gate, 2, i); };
    // as one expert that every row goes to
    return {.T = size(0), .E = 1, .E_local = 1, .K = 1, .H = planner::kTile, .I = size(1)};
}

void SiluMulDeviceOperation::validate_on_program_cache_miss(const operation_attributes_t& attributes,
                                                            const tensor_args_t& tensors) {
    const planner::Problem sizes = problem(attributes, tensors);
    const auto check = [&](const char* name, const ttnn::Tensor& tensor) {
        check_tensor(name, tensor, {sizes.T, sizes.I}, {DataType::BFLOAT16}, Layout::TILE, tensors.gate);
    };
    check("gate", tensors.gate);
    check("up", tensors.up);
    if (tensors.output.has_value()) {
        check("output", *tensors.output);
    }
    TT_FATAL(sizes.T % planner::kTile == 0,
             "gate has rows beside whole tiles; got {}; expected a multiple of 32.", sizes.T);
    check_memory_config(attributes.memory_config);
    program(attributes, tensors);  // throws if there is none
}

SiluMulDeviceOperation::spec_return_value_t SiluMulDeviceOperation::compute_output_specs(
    const operation_attributes_t& attributes, const tensor_args_t& tensors) {
    const planner::Problem sizes = problem(attributes, tensors);
    return spec_of({sizes.T, sizes.I}, DataType::BFLOAT16, Layout::TILE);
}

SiluMulDeviceOperation::tensor_return_value_t SiluMulDeviceOperation::create_output_tensors(
    const operation_attributes_t& attributes, const tensor_args_t& tensors) {
    if (tensors.output.has_value()) {
        return *tensors.output;
    }
    return create_device_tensor(compute_output_specs(attributes, tensors), tensors.gate.device());
}

ttsl::hash::hash_t SiluMulDeviceOperation::compute_program_hash(const operation_attributes_t& attributes,
                                                                const tensor_args_t& tensors) {
    const planner::Problem sizes = problem(attributes, tensors);
    const ttnn::Tensor& beside = tensors.gate;
    return hash_of<SiluMulDeviceOperation>(
        sizes, key_of(attributes.memory_config), key_of(beside, attributes.subdevice_id),
        key_of(tensors.gate, beside), key_of(tensors.up, beside),
        key_of(tensors.output.has_value() ? &*tensors.output : nullptr, beside, 0, {sizes.T, sizes.I},
               DataType::BFLOAT16, Layout::TILE));
}

}  // namespace ttnn::operations::experimental::moe

namespace ttnn::prim {

ttnn::Tensor moe_silu_mul(const ttnn::Tensor& gate, const ttnn::Tensor& up,
                          const std::optional<ttnn::Tensor>& output,
                          const std::optional<tt::tt_metal::MemoryConfig>& memory_config,
                          const std::optional<tt::tt_metal::SubDeviceId>& subdevice_id) {
    using Operation = operations::experimental::moe::SiluMulDeviceOperation;
    return ttnn::device_operation::launch<Operation>(
        Operation::operation_attributes_t{.memory_config = memory_config, .subdevice_id = subdevice_id},
        Operation::tensor_args_t{.gate = gate, .up = up, .output = output});
}

}  // namespace ttnn::prim
