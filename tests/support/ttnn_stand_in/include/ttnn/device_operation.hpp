// SPDX-License-Identifier: Apache-2.0
// Stand-in: of ttnn's header only what cpp/ttnn_ops uses. launch() takes the steps of ttnn's in its order,
// with a program cache, up to the enqueueing.
#pragma once

#include <cstdint>
#include <functional>
#include <type_traits>
#include <typeinfo>
#include <variant>
#include <vector>

#include "stand_in.hpp"
#include "ttnn/tensor/tensor.hpp"
#include "ttnn/types.hpp"

namespace ttsl::hash {

using hash_t = std::uint64_t;

template <typename T>
inline const hash_t type_hash = typeid(T).hash_code();

template <typename... Types>
hash_t hash_objects_with_default_seed(const Types&... args) noexcept {
    hash_t seed = 1234;
    ((seed ^= std::hash<Types>{}(args) + 0x9e3779b9 + (seed << 6) + (seed >> 2)), ...);
    return seed;
}

}  // namespace ttsl::hash

namespace ttnn::device_operation {

inline const Tensor& first_of(const Tensor& tensor) { return tensor; }
inline const Tensor& first_of(const std::vector<Tensor>& tensors) { return tensors.front(); }

template <typename Operation>
typename Operation::tensor_return_value_t launch(const typename Operation::operation_attributes_t& attributes,
                                                 const typename Operation::tensor_args_t& tensors) {
    using tt::tt_metal::Program;
    using Factory = std::variant_alternative_t<0, typename Operation::program_factory_t>;
    static_assert(std::variant_size_v<typename Operation::program_factory_t> == 1);
    static_assert(std::is_same_v<decltype(Operation::compute_output_specs(attributes, tensors)),
                                 typename Operation::spec_return_value_t>);

    auto outputs = Operation::create_output_tensors(attributes, tensors);
    auto* device = first_of(outputs).device();
    const std::uint64_t hash = Operation::compute_program_hash(attributes, tensors);
    auto found = device->programs.find(hash);
    if (found == device->programs.end()) {
        Operation::validate_on_program_cache_miss(attributes, tensors);
        found = device->programs.try_emplace(hash, Factory::create_descriptor(attributes, tensors, outputs))
                    .first;
    } else {
        Operation::validate_on_program_cache_hit(attributes, tensors);
        Factory::override_runtime_arguments(found->second, attributes, tensors, outputs, std::nullopt);
    }
    if (device->keep) {
        device->launched.push_back(found->second.descriptor);
    }
    return outputs;
}

}  // namespace ttnn::device_operation
