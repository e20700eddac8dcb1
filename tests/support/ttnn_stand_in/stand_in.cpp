// SPDX-License-Identifier: Apache-2.0
// Definitions of what TT-NN's libraries export.

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "tt-metalium/host_api.hpp"
#include "tt-metalium/tensor_accessor_args.hpp"
#include "ttnn/tensor/tensor_ops.hpp"

namespace tt::tt_metal {

CoreRange::CoreRange(const CoreCoord& start_coord, const CoreCoord& end_coord)
    : start_coord(start_coord), end_coord(end_coord) {}

CoreRangeSet::CoreRangeSet(std::vector<CoreRange>&& core_ranges) : ranges_(std::move(core_ranges)) {}
const std::vector<CoreRange>& CoreRangeSet::ranges() const { return ranges_; }

CoreRange CoreRangeSet::bounding_box() const {
    CoreRange box = ranges_.at(0);
    for (const CoreRange& range : ranges_) {
        box.start_coord = {std::min(box.start_coord.x, range.start_coord.x),
                           std::min(box.start_coord.y, range.start_coord.y)};
        box.end_coord = {std::max(box.end_coord.x, range.end_coord.x),
                         std::max(box.end_coord.y, range.end_coord.y)};
    }
    return box;
}

std::uint32_t CoreRangeSet::num_cores() const {
    std::uint32_t found = 0;
    for (const CoreRange& range : ranges_) {
        found +=
            (range.end_coord.x - range.start_coord.x + 1) * (range.end_coord.y - range.start_coord.y + 1);
    }
    return found;
}

DataFormat datatype_to_dataformat_converter(DataType datatype) {
    switch (datatype) {
        case DataType::BFLOAT16:
            return DataFormat::Float16_b;
        case DataType::FLOAT32:
            return DataFormat::Float32;
        case DataType::BFLOAT8_B:
            return DataFormat::Bfp8_b;
        case DataType::BFLOAT4_B:
            return DataFormat::Bfp4_b;
        case DataType::UINT32:
            return DataFormat::UInt32;
        default:
            throw std::runtime_error("not in the stand-in");
    }
}

std::size_t Shape::rank() const { return value_.size(); }

MemoryConfig::MemoryConfig(TensorMemoryLayout memory_layout, BufferType buffer_type, std::optional<ShardSpec>)
    : memory_layout_(memory_layout), buffer_type_(buffer_type) {}
MemoryConfig::~MemoryConfig() = default;
TensorMemoryLayout MemoryConfig::memory_layout() const { return memory_layout_; }
BufferType MemoryConfig::buffer_type() const { return buffer_type_; }

PageConfig::PageConfig(Layout layout) : layout(layout) {}

TensorLayout::TensorLayout(DataType dtype, const PageConfig& page_config, const MemoryConfig& memory_config,
                           const Alignment&)
    : dtype(dtype), page_config(page_config), memory_config(memory_config) {}
TensorLayout::~TensorLayout() = default;

TensorSpec::TensorSpec(Shape logical_shape, TensorLayout tensor_layout)
    : logical_shape(std::move(logical_shape)), tensor_layout(std::move(tensor_layout)) {}

std::uint64_t Buffer::address() const { return address_; }

TensorAccessorArgs::TensorAccessorArgs(const Buffer& buffer, tensor_accessor::ArgsConfig)
    : buffer_(&buffer) {}

// Interleaved in DRAM and the page size, as on the device; and the address, which tells tensors apart.
void TensorAccessorArgs::append_to(std::vector<std::uint32_t>& compile_time_args) const {
    compile_time_args.insert(compile_time_args.end(),
                             {2, buffer_->page_size, static_cast<std::uint32_t>(buffer_->address())});
}

Program::Program(const ProgramDescriptor& descriptor) : descriptor(descriptor) {
    for (KernelDescriptor& kernel : this->descriptor.kernels) {
        common_args.push_back({kernel.common_runtime_args.data(), kernel.common_runtime_args.size()});
    }
}

RuntimeArgsData& GetCommonRuntimeArgs(const Program& program, KernelHandle kernel_id) {
    return program.common_args.at(kernel_id);
}

namespace distributed {

tt::ARCH MeshDevice::arch() const { return arch_; }
CoreCoord MeshDevice::compute_with_storage_grid_size() const { return grid_; }
CoreCoord MeshDevice::dram_grid_size() const { return {arch_ == tt::ARCH::BLACKHOLE ? 8u : 12u, 1u}; }
std::uint32_t MeshDevice::l1_size_per_core() const { return l1_bytes_; }
CoreRangeSet MeshDevice::worker_cores(HalProgrammableCoreType, SubDeviceId sub_device_id) const {
    return sub_devices.at(*sub_device_id);
}
// Two numberings that no other argument looks like; a column is missing, as on a chip.
CoreCoord MeshDevice::worker_core_from_logical_core(const CoreCoord& core) const {
    return {1001 + core.x + (core.x > 6 ? 2 : 0), 2002 + core.y};
}

}  // namespace distributed
}  // namespace tt::tt_metal

namespace ttnn {

using namespace tt::tt_metal;

namespace {

std::uint32_t page_size_of(const TensorSpec& spec) {
    const DataType dtype = spec.tensor_layout.dtype;
    const std::uint32_t item = dtype == DataType::BFLOAT16 ? 2 : 4;
    if (spec.tensor_layout.page_config.layout == Layout::TILE) {
        return dtype == DataType::BFLOAT8_B ? 1088 : dtype == DataType::BFLOAT4_B ? 576 : 1024 * item;
    }
    return spec.logical_shape[static_cast<int>(spec.logical_shape.rank()) - 1] * item;
}

}  // namespace

Tensor::Tensor(TensorSpec spec, distributed::MeshDevice* device, std::shared_ptr<Buffer> buffer)
    : spec_(std::make_shared<const TensorSpec>(std::move(spec))),
      device_(device),
      buffer_(std::move(buffer)) {}
Tensor::~Tensor() = default;
DataType Tensor::dtype() const { return spec_->tensor_layout.dtype; }
Layout Tensor::layout() const { return spec_->tensor_layout.page_config.layout; }
const Shape& Tensor::logical_shape() const { return spec_->logical_shape; }
const MemoryConfig& Tensor::memory_config() const { return spec_->tensor_layout.memory_config; }
StorageType Tensor::storage_type() const {
    return device_ == nullptr ? StorageType::HOST : StorageType::DEVICE;
}

Buffer* Tensor::buffer() const {
    if (buffer_ == nullptr) {
        throw std::runtime_error("the tensor is not on a device");
    }
    return buffer_.get();
}

distributed::MeshDevice* Tensor::device() const {
    if (device_ == nullptr) {
        throw std::runtime_error("the tensor is not on a device");
    }
    return device_;
}

Tensor create_device_tensor(const TensorSpec& spec, distributed::MeshDevice* device,
                            std::optional<TensorTopology>) {
    const std::uint64_t address = device->next_address;
    device->next_address += 1 << 12;
    return {spec, device, std::make_shared<Buffer>(address, page_size_of(spec))};
}

}  // namespace ttnn
