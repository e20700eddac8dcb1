// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planner/problem.hpp"
#include "ttnn/tensor/tensor.hpp"

namespace ttnn::operations::experimental::moe {

// Size `i` of a tensor that has `rank` dimensions; throws if it has not.
std::uint32_t size_of(const char* name, const ttnn::Tensor& tensor, std::size_t rank, std::size_t i);

// A tensor that goes into a kernel: its form, on the device of another, interleaved in DRAM. Throws what is
// wrong, and the ttnn call that makes it right.
void check_tensor(const std::string& name, const ttnn::Tensor& tensor,
                  const std::vector<std::uint32_t>& shape, const std::vector<tt::tt_metal::DataType>& dtypes,
                  tt::tt_metal::Layout layout, const ttnn::Tensor& beside);

// Columns N of an expert weight [K, N] in bank order: [E_local, N / 32, K, 32]. Throws for a plain matrix.
std::uint32_t weight_columns(const char* name, const ttnn::Tensor& weight);

// Such a weight of these sizes, as check_tensor checks a tensor.
void check_weight(const char* name, const ttnn::Tensor& weight, std::uint32_t experts, std::uint32_t rows,
                  std::uint32_t columns, const std::vector<tt::tt_metal::DataType>& dtypes,
                  const ttnn::Tensor& beside);

// The routing that gate_up and down read: num_routed_tokens [1, E], device_expert_mapping [1, E_local],
// routed_tokens [E, T], T whole blocks of 32, all int32 row-major.
void check_routing(const ::ttnn_moe::planner::Problem& sizes, const ttnn::Tensor& num_routed_tokens,
                   const ttnn::Tensor& device_expert_mapping, const ttnn::Tensor& routed_tokens,
                   const ttnn::Tensor& beside);

// What the checks read of a tensor, as one number. A program's hash takes in those of all tensors, so tensors
// at a cache hit passed the checks at the miss. rows is subtracted from the first size: T for a tensor of T
// rows, since one program serves every T.
std::uint64_t key_of(const ttnn::Tensor& tensor, const ttnn::Tensor& beside, std::uint32_t rows = 0);

// The same of an output, or of the one that spec_of describes where none is given (nullptr).
std::uint64_t key_of(const ttnn::Tensor* output, const ttnn::Tensor& beside, std::uint32_t rows,
                     const std::array<std::uint32_t, 2>& shape, tt::tt_metal::DataType dtype,
                     tt::tt_metal::Layout layout);

// What outputs may be asked to lie in: DRAM, interleaved. A program's circular buffers take all of L1.
void check_memory_config(const std::optional<tt::tt_metal::MemoryConfig>& config);
std::uint64_t key_of(const std::optional<tt::tt_metal::MemoryConfig>& config);

// Of the experts' weights.
const std::vector<tt::tt_metal::DataType>& weight_dtypes();

// The planner's name of a dtype of weights or outputs: "bfloat16", "bfloat8_b", "float32" ...
std::string name_of(tt::tt_metal::DataType dtype);

// A tensor that an operator makes: interleaved in DRAM.
tt::tt_metal::TensorSpec spec_of(const std::vector<std::uint32_t>& shape, tt::tt_metal::DataType dtype,
                                 tt::tt_metal::Layout layout);

}  // namespace ttnn::operations::experimental::moe
