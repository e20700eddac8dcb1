#pragma once

#include <cstdint>
#include <optional>
#include <tt-metalium/program_descriptors.hpp>
#include <variant>

#include "planner/problem.hpp"
#include "ttnn/device_operation.hpp"
#include "ttnn/tensor/tensor.hpp"
#include "ttnn/types.hpp"
#include "ttnn_ops/common/descriptor.hpp"

namespace ttnn::operations::experimental::moe {

// gate, up [rows, I] bfloat16 in tiles, rows and I multiples of 32 -> silu(gate) * up, the same.
struct SiluMulDeviceOperation {
    struct operation_attributes_t {};
    struct tensor_args_t {
        ttnn::Tensor gate;
        ttnn::Tensor up;
        std::optional<ttnn::Tensor> output;
    };

    using spec_return_value_t = tt::tt_metal::TensorSpec;
    using tensor_return_value_t = ttnn::Tensor;

    struct ProgramFactory {
        static tt::tt_metal::ProgramDescriptor create_descriptor(
            const operation_attributes_t& operation_attributes, const tensor_args_t& tensor_args,
            tensor_return_value_t& tensor_return_value);

        // What the program hash leaves out, addresses and numbers of the call, is written at every cache hit.
        static void override_runtime_arguments(
            tt::tt_metal::Program& program, const operation_attributes_t& operation_attributes,
            const tensor_args_t& tensor_args, tensor_return_value_t& tensor_return_value,
            const std::optional<ttnn::MeshCoordinate>& mesh_dispatch_coordinate = std::nullopt);
    };
    using program_factory_t = std::variant<ProgramFactory>;

    static void validate_on_program_cache_miss(const operation_attributes_t&, const tensor_args_t&);
    // The same: the hash leaves out the tensors' specs.
    static void validate_on_program_cache_hit(const operation_attributes_t&, const tensor_args_t&);
    static spec_return_value_t compute_output_specs(const operation_attributes_t&, const tensor_args_t&);
    static tensor_return_value_t create_output_tensors(const operation_attributes_t&, const tensor_args_t&);
    // Of what the plan and the compile-time arguments depend on: one program for all T up to the bound.
    static ttsl::hash::hash_t compute_program_hash(const operation_attributes_t&, const tensor_args_t&);

    // Sizes to plan for. Throws if the tensors have not the dimensions to tell.
    static ::ttnn_moe::planner::Problem problem(const operation_attributes_t&, const tensor_args_t&);
};

}  // namespace ttnn::operations::experimental::moe

namespace ttnn::prim {

ttnn::Tensor moe_silu_mul(const ttnn::Tensor& gate, const ttnn::Tensor& up,
                          const std::optional<ttnn::Tensor>& output);

}  // namespace ttnn::prim
