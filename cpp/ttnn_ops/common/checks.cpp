// SPDX-License-Identifier: Apache-2.0
#include "ttnn_ops/common/checks.hpp"

#include <algorithm>
#include <tt_stl/assert.hpp>

#include "ttnn/device_operation.hpp"

namespace ttnn::operations::experimental::moe {

using namespace tt::tt_metal;

namespace {

std::string in_words(const std::vector<std::uint32_t>& shape) {
    std::string text;
    for (const std::uint32_t size : shape) {
        text += (text.empty() ? "" : ", ") + std::to_string(size);
    }
    return "[" + text + "]";
}

std::string in_words(Layout layout) { return layout == Layout::TILE ? "TILE" : "ROW_MAJOR"; }

std::string in_words(const std::vector<DataType>& dtypes) {
    std::string text;
    for (const DataType dtype : dtypes) {
        text += (text.empty() ? "" : " or ") + name_of(dtype);
    }
    return text;
}

bool in_dram(const MemoryConfig& config) {
    return config.memory_layout() == TensorMemoryLayout::INTERLEAVED &&
           config.buffer_type() == BufferType::DRAM;
}

std::string in_words(const MemoryConfig& config) {
    const bool interleaved = config.memory_layout() == TensorMemoryLayout::INTERLEAVED;
    return std::string(interleaved ? "interleaved" : "sharded") + " in " +
           (config.buffer_type() == BufferType::DRAM ? "DRAM" : "L1");
}

std::vector<std::uint32_t> sizes(const ttnn::Tensor& tensor) {
    const auto& shape = tensor.logical_shape();
    std::vector<std::uint32_t> found;
    for (std::size_t i = 0; i < shape.rank(); i++) {
        found.push_back(shape[static_cast<int>(i)]);
    }
    return found;
}

// The shape with ones in front, or with its first dimensions as one.
std::vector<std::uint32_t> of_rank(std::vector<std::uint32_t> shape, std::size_t rank) {
    shape.insert(shape.begin(), rank - std::min(rank, shape.size()), 1);
    while (shape.size() > rank) {
        shape[1] *= shape[0];
        shape.erase(shape.begin());
    }
    return shape;
}

constexpr std::size_t kMaxRank = 4;  // of a tensor that passes

std::uint64_t key_of(const std::array<std::uint32_t, kMaxRank + 1>& sizes, DataType dtype, Layout layout,
                     TensorMemoryLayout memory, BufferType buffer, bool on_device, bool elsewhere) {
    return ttsl::hash::hash_objects_with_default_seed(
        sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], static_cast<std::uint32_t>(dtype),
        static_cast<std::uint32_t>(layout), static_cast<std::uint32_t>(memory),
        static_cast<std::uint32_t>(buffer), on_device, elsewhere);
}

}  // namespace

std::uint32_t size_of(const char* name, const ttnn::Tensor& tensor, std::size_t rank, std::size_t i) {
    const auto& shape = tensor.logical_shape();
    TT_FATAL(shape.rank() == rank,
             "{} has the wrong number of dimensions; got {}; expected {} dimensions; to fix it: "
             "ttnn.reshape({}, {}).",
             name, in_words(sizes(tensor)), rank, name, in_words(of_rank(sizes(tensor), rank)));
    return shape[static_cast<int>(i)];
}

void check_tensor(const std::string& name, const ttnn::Tensor& tensor,
                  const std::vector<std::uint32_t>& shape, const std::vector<DataType>& dtypes, Layout layout,
                  const ttnn::Tensor& beside) {
    TT_FATAL(sizes(tensor) == shape, "{} has the wrong shape; got {}; expected {}.", name,
             in_words(sizes(tensor)), in_words(shape));
    TT_FATAL(std::ranges::find(dtypes, tensor.dtype()) != dtypes.end(),
             "{} has the wrong dtype; got {}; expected {}; to fix it: ttnn.typecast({}, ttnn.{}).", name,
             name_of(tensor.dtype()), in_words(dtypes), name, name_of(dtypes.front()));
    TT_FATAL(tensor.layout() == layout,
             "{} has the wrong layout; got {}; expected {}; to fix it: ttnn.to_layout({}, ttnn.{}_LAYOUT).",
             name, in_words(tensor.layout()), in_words(layout), name, in_words(layout));
    TT_FATAL(tensor.storage_type() == ttnn::StorageType::DEVICE,
             "{} is not on a device; got HOST; expected DEVICE; to fix it: ttnn.to_device({}, device).", name,
             name);
    TT_FATAL(beside.storage_type() != ttnn::StorageType::DEVICE || tensor.device() == beside.device(),
             "{} is on another device; got one that the other tensors are not on; expected theirs.", name);
    TT_FATAL(in_dram(tensor.memory_config()),
             "{} is not interleaved in DRAM; got {}; expected DRAM_MEMORY_CONFIG; to fix it: "
             "ttnn.to_memory_config({}, ttnn.DRAM_MEMORY_CONFIG).",
             name, in_words(tensor.memory_config()), name);
}

std::uint32_t weight_columns(const char* name, const ttnn::Tensor& weight) {
    const auto& shape = weight.logical_shape();
    TT_FATAL(shape.rank() == 4,
             "{} is not in bank order; got {}; expected [E_local, columns / 32, rows, 32]; to fix it: "
             "in_bank_order of ttnn_moe/tenstorrent/weights.py.",
             name, in_words(sizes(weight)));
    return shape[1] * ::ttnn_moe::planner::kTile;
}

void check_weight(const char* name, const ttnn::Tensor& weight, std::uint32_t experts, std::uint32_t rows,
                  std::uint32_t columns, const std::vector<DataType>& dtypes, const ttnn::Tensor& beside) {
    constexpr std::uint32_t tile = ::ttnn_moe::planner::kTile;
    weight_columns(name, weight);  // throws if it is a matrix
    check_tensor(name, weight, {experts, columns / tile, rows, tile}, dtypes, Layout::TILE, beside);
}

void check_routing(const ::ttnn_moe::planner::Problem& sizes, const ttnn::Tensor& num_routed_tokens,
                   const ttnn::Tensor& device_expert_mapping, const ttnn::Tensor& routed_tokens,
                   const ttnn::Tensor& beside) {
    const auto check = [&](const char* name, const ttnn::Tensor& tensor, std::uint32_t rows,
                           std::uint32_t columns) {
        check_tensor(name, tensor, {rows, columns}, {DataType::INT32}, Layout::ROW_MAJOR, beside);
    };
    TT_FATAL(sizes.T % ::ttnn_moe::planner::kTile == 0,
             "routed_tokens has columns beside whole blocks; got {}; expected a multiple of 32, as kernels "
             "read 32 entries at a time; to fix it: pad the rows.",
             sizes.T);
    check("num_routed_tokens", num_routed_tokens, 1, sizes.E);
    check("device_expert_mapping", device_expert_mapping, 1, sizes.E_local);
    check("routed_tokens", routed_tokens, sizes.E, sizes.T);
}

std::uint64_t key_of(const ttnn::Tensor& tensor, const ttnn::Tensor& beside, std::uint32_t rows) {
    const auto& shape = tensor.logical_shape();
    std::array<std::uint32_t, kMaxRank + 1> sizes{static_cast<std::uint32_t>(shape.rank())};
    for (std::size_t i = 0; i < std::min(shape.rank(), kMaxRank); i++) {
        sizes[i + 1] = shape[static_cast<int>(i)] - (i == 0 ? rows : 0);
    }
    const bool on_device = tensor.storage_type() == ttnn::StorageType::DEVICE;
    const bool comparable = on_device && beside.storage_type() == ttnn::StorageType::DEVICE;
    return key_of(sizes, tensor.dtype(), tensor.layout(), tensor.memory_config().memory_layout(),
                  tensor.memory_config().buffer_type(), on_device,
                  comparable && tensor.device() != beside.device());
}

std::uint64_t key_of(const ttnn::Tensor* output, const ttnn::Tensor& beside, std::uint32_t rows,
                     const std::array<std::uint32_t, 2>& shape, DataType dtype, Layout layout) {
    return output != nullptr ? key_of(*output, beside, rows)
                             : key_of({2, shape[0] - rows, shape[1]}, dtype, layout,
                                      TensorMemoryLayout::INTERLEAVED, BufferType::DRAM, true, false);
}

void check_memory_config(const std::optional<MemoryConfig>& config) {
    TT_FATAL(!config.has_value() || in_dram(*config),
             "memory_config is not interleaved DRAM; got {}; expected DRAM_MEMORY_CONFIG; to fix it: leave "
             "memory_config out, then ttnn.to_memory_config(output, memory_config).",
             in_words(*config));
}

std::uint64_t key_of(const std::optional<MemoryConfig>& config) {
    return !config.has_value() || in_dram(*config);
}

const std::vector<DataType>& weight_dtypes() {
    static const std::vector<DataType> dtypes{DataType::BFLOAT16, DataType::BFLOAT8_B, DataType::BFLOAT4_B};
    return dtypes;
}

std::string name_of(DataType dtype) {
    switch (dtype) {
        case DataType::BFLOAT16:
            return "bfloat16";
        case DataType::FLOAT32:
            return "float32";
        case DataType::BFLOAT8_B:
            return "bfloat8_b";
        case DataType::BFLOAT4_B:
            return "bfloat4_b";
        case DataType::INT32:
            return "int32";
        case DataType::UINT32:
            return "uint32";
        default:
            return "another dtype";
    }
}

TensorSpec spec_of(const std::vector<std::uint32_t>& shape, DataType dtype, Layout layout) {
    return {Shape(shape), TensorLayout(dtype, PageConfig(layout),
                                       MemoryConfig(TensorMemoryLayout::INTERLEAVED, BufferType::DRAM))};
}

}  // namespace ttnn::operations::experimental::moe
