// SPDX-License-Identifier: Apache-2.0
// Stand-in: what tt-metal's headers say of tensors' types, as far as cpp/ttnn_ops uses it. (tt-metal has
// these in several headers, which ttnn/tensor/tensor.hpp includes.)
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <vector>

#include "tt-metalium/core_coord.hpp"

namespace tt {

enum class ARCH { GRAYSKULL, WORMHOLE_B0, BLACKHOLE };
enum class DataFormat : std::uint8_t {
    Float32 = 0,
    Float16_b = 5,
    Bfp8_b = 6,
    Bfp4_b = 7,
    Int32 = 8,
    UInt32 = 24
};

namespace tt_metal {

enum class DataType { BFLOAT16, FLOAT32, UINT32, BFLOAT8_B, BFLOAT4_B, UINT8, UINT16, INT32 };
enum class Layout { ROW_MAJOR, TILE };
enum class BufferType { DRAM, L1 };
enum class TensorMemoryLayout { INTERLEAVED, HEIGHT_SHARDED };
struct ShardSpec {};

DataFormat datatype_to_dataformat_converter(DataType datatype);

class ShapeBase {
  public:
    explicit ShapeBase(std::span<const std::uint32_t> sizes) : value_(sizes.begin(), sizes.end()) {}

    std::uint32_t operator[](std::int32_t index) const { return value_.at(index); }

  protected:
    std::vector<std::uint32_t> value_;
};

class Shape : public ShapeBase {
  public:
    using ShapeBase::ShapeBase;

    std::size_t rank() const;
};

class MemoryConfig {
  public:
    explicit MemoryConfig(TensorMemoryLayout memory_layout, BufferType buffer_type = BufferType::DRAM,
                          std::optional<ShardSpec> shard_spec = std::nullopt);
    MemoryConfig(const MemoryConfig&) = default;
    ~MemoryConfig();

    TensorMemoryLayout memory_layout() const;
    BufferType buffer_type() const;

  private:
    TensorMemoryLayout memory_layout_;
    BufferType buffer_type_;
};

class PageConfig {
  public:
    PageConfig(Layout layout);

    Layout layout;
};

class Alignment {};

class TensorLayout {
  public:
    TensorLayout(DataType dtype, const PageConfig& page_config, const MemoryConfig& memory_config,
                 const Alignment& alignment = {});
    TensorLayout(const TensorLayout&) = default;
    ~TensorLayout();

    DataType dtype;
    PageConfig page_config;
    MemoryConfig memory_config;
};

class TensorSpec {
  public:
    TensorSpec(Shape logical_shape, TensorLayout tensor_layout);

    Shape logical_shape;
    TensorLayout tensor_layout;
};

class TensorTopology {};

class Buffer {
  public:
    Buffer(std::uint64_t address, std::uint32_t page_size) : address_(address), page_size(page_size) {}

    std::uint64_t address() const;

  private:
    std::uint64_t address_;

  public:
    std::uint32_t page_size;
};

namespace distributed {

// Instead of running a program, it keeps what it would run: stand_in.hpp.
class MeshDevice;

}  // namespace distributed
}  // namespace tt_metal
}  // namespace tt
