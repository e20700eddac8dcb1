// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <tt-metalium/sub_device_types.hpp>
#include <variant>

#include "planner/problem.hpp"
#include "ttnn/device_operation.hpp"
#include "ttnn/operations/core/compute_kernel/compute_kernel_config.hpp"
#include "ttnn/tensor/tensor.hpp"
#include "ttnn_ops/common/program_factory.hpp"

namespace ttnn::operations::experimental::moe {

// activations [rows, I] bfloat16 in tiles, a routing, weight [E_local, H / 32, I, 32] bfloat16, bfloat8_b or
// bfloat4_b, tiles in bank order -> [T, H] bfloat16 or float32 in tiles: each row times weight times its
// routing weight, summed over the rows of a token.
struct DownDeviceOperation {
    struct operation_attributes_t {
        std::uint32_t experts_per_token;  // K
        std::uint32_t num_tokens;         // T
        tt::tt_metal::DataType output_dtype;
        bool accumulate;  // add to output instead of overwriting it
        std::optional<tt::tt_metal::MemoryConfig> memory_config;
        std::optional<tt::tt_metal::SubDeviceId> subdevice_id;
        std::optional<DeviceComputeKernelConfig> compute_kernel_config;
    };
    struct tensor_args_t {
        ttnn::Tensor activations;
        ttnn::Tensor num_routed_tokens;      // [1, E] int32 row-major
        ttnn::Tensor device_expert_mapping;  // [1, E_local] int32 row-major
        ttnn::Tensor routed_tokens;          // [E, bound] int32 row-major, bound a multiple of 32
        ttnn::Tensor routed_token_weights;   // [E, bound] bfloat16 row-major
        ttnn::Tensor weight;
        std::optional<ttnn::Tensor> output;
    };

    using spec_return_value_t = tt::tt_metal::TensorSpec;
    using tensor_return_value_t = ttnn::Tensor;
    using program_factory_t = std::variant<ProgramFactory<DownDeviceOperation>>;

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

ttnn::Tensor moe_down(const ttnn::Tensor& activations, const ttnn::Tensor& num_routed_tokens,
                      const ttnn::Tensor& device_expert_mapping, const ttnn::Tensor& routed_tokens,
                      const ttnn::Tensor& routed_token_weights, const ttnn::Tensor& weight,
                      std::uint32_t experts_per_token, std::uint32_t num_tokens,
                      tt::tt_metal::DataType output_dtype, bool accumulate,
                      const std::optional<ttnn::Tensor>& output,
                      const std::optional<tt::tt_metal::MemoryConfig>& memory_config,
                      const std::optional<tt::tt_metal::SubDeviceId>& subdevice_id,
                      const std::optional<DeviceComputeKernelConfig>& compute_kernel_config);

}  // namespace ttnn::prim
