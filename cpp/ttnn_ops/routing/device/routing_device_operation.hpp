// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <tt-metalium/sub_device_types.hpp>
#include <variant>
#include <vector>

#include "planner/problem.hpp"
#include "ttnn/device_operation.hpp"
#include "ttnn/tensor/tensor.hpp"
#include "ttnn_ops/common/program_factory.hpp"

namespace ttnn::operations::experimental::moe {

// topk_ids [T, K] int32, topk_weights [T, K] float32, device_expert_mapping [1, E_local] int32, row-major ->
// num_routed_tokens [1, E] int32, routed_tokens [E, bound] int32, routed_token_weights [E, bound] bfloat16,
// row-major.
struct RoutingDeviceOperation {
    struct operation_attributes_t {
        std::uint32_t num_experts;  // E, of all devices
        std::uint32_t token_bound;  // most tokens of a call that the program serves
        std::optional<tt::tt_metal::MemoryConfig> memory_config;
        std::optional<tt::tt_metal::SubDeviceId> subdevice_id;
    };
    struct tensor_args_t {
        ttnn::Tensor topk_ids;
        ttnn::Tensor topk_weights;
        ttnn::Tensor device_expert_mapping;
        std::vector<ttnn::Tensor> outputs;  // the three, or none
    };

    using spec_return_value_t = std::vector<tt::tt_metal::TensorSpec>;
    using tensor_return_value_t = std::vector<ttnn::Tensor>;
    using program_factory_t = std::variant<ProgramFactory<RoutingDeviceOperation>>;

    static void validate_on_program_cache_miss(const operation_attributes_t&, const tensor_args_t&);
    // Nothing is left: the hash holds what a miss checks.
    static void validate_on_program_cache_hit(const operation_attributes_t&, const tensor_args_t&) {}
    static spec_return_value_t compute_output_specs(const operation_attributes_t&, const tensor_args_t&);
    static tensor_return_value_t create_output_tensors(const operation_attributes_t&, const tensor_args_t&);
    static ttsl::hash::hash_t compute_program_hash(const operation_attributes_t&, const tensor_args_t&);

    // Sizes to plan for. Throws if the tensors have not the dimensions to tell.
    static planner::Problem problem(const operation_attributes_t&, const tensor_args_t&);
    // What ProgramFactory makes its program of.
    static const planner::Program& program(const operation_attributes_t&, const tensor_args_t&);
    static Call call(const operation_attributes_t&, const tensor_args_t&, const tensor_return_value_t&);
};

}  // namespace ttnn::operations::experimental::moe

namespace ttnn::prim {

std::vector<ttnn::Tensor> moe_routing(const ttnn::Tensor& topk_ids, const ttnn::Tensor& topk_weights,
                                      const ttnn::Tensor& device_expert_mapping, std::uint32_t num_experts,
                                      std::uint32_t token_bound, const std::vector<ttnn::Tensor>& outputs,
                                      const std::optional<tt::tt_metal::MemoryConfig>& memory_config,
                                      const std::optional<tt::tt_metal::SubDeviceId>& subdevice_id);

}  // namespace ttnn::prim
