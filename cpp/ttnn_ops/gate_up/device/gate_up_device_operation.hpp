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

// hidden [T, H] bfloat16 row-major, a routing, gate and up [E_local, H, I] bfloat16 or bfloat8_b in tiles ->
// [rows, I] bfloat16 in tiles: silu(hidden gate) * (hidden up), or hidden gate where there is no up. Rows of
// an expert start at a multiple of 32, in device_expert_mapping order.
struct GateUpDeviceOperation {
    struct operation_attributes_t {
        std::uint32_t experts_per_token;  // K
    };
    struct tensor_args_t {
        ttnn::Tensor hidden;
        ttnn::Tensor num_routed_tokens;      // [1, E] int32 row-major
        ttnn::Tensor device_expert_mapping;  // [1, E_local] int32 row-major
        ttnn::Tensor routed_tokens;          // [E, bound] int32 row-major
        ttnn::Tensor gate;
        std::optional<ttnn::Tensor> up;
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

ttnn::Tensor moe_gate_up(const ttnn::Tensor& hidden, const ttnn::Tensor& num_routed_tokens,
                         const ttnn::Tensor& device_expert_mapping, const ttnn::Tensor& routed_tokens,
                         const ttnn::Tensor& gate, const std::optional<ttnn::Tensor>& up,
                         std::uint32_t experts_per_token, const std::optional<ttnn::Tensor>& output);

}  // namespace ttnn::prim
