// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <tt-metalium/sub_device_types.hpp>
#include <variant>

#include "planner/problem.hpp"
#include "ttnn/device_operation.hpp"
#include "ttnn/tensor/tensor.hpp"
#include "ttnn_ops/common/program_factory.hpp"

namespace ttnn::operations::experimental::moe {

// gate, up [rows, I] bfloat16 in tiles, rows and I multiples of 32 -> silu(gate) * up, the same.
struct SiluMulDeviceOperation {
    struct operation_attributes_t {
        std::optional<tt::tt_metal::MemoryConfig> memory_config;
        std::optional<tt::tt_metal::SubDeviceId> subdevice_id;
    };
    struct tensor_args_t {
        ttnn::Tensor gate;
        ttnn::Tensor up;
        std::optional<ttnn::Tensor> output;
    };

    using spec_return_value_t = tt::tt_metal::TensorSpec;
    using tensor_return_value_t = ttnn::Tensor;
    using program_factory_t = std::variant<ProgramFactory<SiluMulDeviceOperation>>;

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

ttnn::Tensor moe_silu_mul(const ttnn::Tensor& gate, const ttnn::Tensor& up,
                          const std::optional<ttnn::Tensor>& output,
                          const std::optional<tt::tt_metal::MemoryConfig>& memory_config,
                          const std::optional<tt::tt_metal::SubDeviceId>& subdevice_id);

}  // namespace ttnn::prim
