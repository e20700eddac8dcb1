// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <tt-metalium/program_descriptors.hpp>

#include "planner/problem.hpp"
#include "planner/program.hpp"
#include "ttnn/device_operation.hpp"
#include "ttnn/types.hpp"
#include "ttnn_ops/common/descriptor.hpp"

namespace ttnn::operations::experimental::moe {

namespace planner = ::ttnn_moe::planner;

// The one program factory of every operation here: Operation::program is the plan, Operation::call names the
// tensors and numbers.
template <typename Operation>
struct ProgramFactory {
    static tt::tt_metal::ProgramDescriptor create_descriptor(
        const typename Operation::operation_attributes_t& attributes,
        const typename Operation::tensor_args_t& tensors, typename Operation::tensor_return_value_t& output) {
        return describe(Operation::program(attributes, tensors),
                        Operation::call(attributes, tensors, output));
    }

    // What the program hash leaves out, addresses and numbers of the call, is written at every cache hit.
    static void override_runtime_arguments(
        tt::tt_metal::Program& program, const typename Operation::operation_attributes_t& attributes,
        const typename Operation::tensor_args_t& tensors, typename Operation::tensor_return_value_t& output,
        const std::optional<ttnn::MeshCoordinate>& /*mesh_dispatch_coordinate*/ = std::nullopt) {
        rebind(program, Operation::program(attributes, tensors),
               Operation::call(attributes, tensors, output));
    }
};

// Of what the plan, the compile-time arguments and the checks depend on: one program for every T up to the
// bound.
template <typename Operation, typename... More>
ttsl::hash::hash_t hash_of(const planner::Problem& p, const More&... more) {
    return ttsl::hash::hash_objects_with_default_seed(ttsl::hash::type_hash<Operation>, p.T, p.E, p.E_local,
                                                      p.K, p.H, p.I, p.weight_format, p.out_format,
                                                      p.math_fidelity, p.fp32_dest, more...);
}

}  // namespace ttnn::operations::experimental::moe
