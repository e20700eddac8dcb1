// SPDX-License-Identifier: Apache-2.0
// The stand-in as a Python module: devices and tensors to call the operations with, programs to look at.

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>

#include "tt-metalium/host_api.hpp"
#include "ttnn/operations/core/compute_kernel/compute_kernel_config.hpp"
#include "ttnn/tensor/tensor_ops.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tt::tt_metal;
using tt::tt_metal::distributed::MeshDevice;

namespace {

nb::list ranges(const CoreRangeSet& set) {
    nb::list made;
    for (const CoreRange& range : set.ranges()) {
        made.append(
            nb::make_tuple(range.start_coord.x, range.start_coord.y, range.end_coord.x, range.end_coord.y));
    }
    return made;
}

nb::object config(const KernelDescriptor::ConfigDescriptor& config) {
    if (std::holds_alternative<ReaderConfigDescriptor>(config)) {
        return nb::str("reader");
    }
    if (std::holds_alternative<WriterConfigDescriptor>(config)) {
        return nb::str("writer");
    }
    const auto& compute = std::get<ComputeConfigDescriptor>(config);
    nb::list direct;
    for (std::size_t i = 0; i < compute.unpack_to_dest_mode.size(); i++) {
        direct.append(compute.unpack_to_dest_mode[i] == UnpackToDestMode::UnpackToDestFp32);
    }
    nb::dict made;
    made["math_fidelity"] = static_cast<int>(compute.math_fidelity);
    made["math_approx_mode"] = compute.math_approx_mode;
    made["fp32_dest_acc_en"] = compute.fp32_dest_acc_en;
    made["dst_full_sync_en"] = compute.dst_full_sync_en;
    made["unpack_to_dest_fp32"] = direct;
    return made;
}

nb::dict in_python(const ProgramDescriptor& program) {
    nb::list kernels, semaphores, cbs;
    for (const KernelDescriptor& kernel : program.kernels) {
        nb::dict made, args, named, defines;
        for (const auto& [core, own] : kernel.runtime_args) {
            args[nb::make_tuple(core.x, core.y)] = nb::cast(own);
        }
        for (const auto& [name, value] : kernel.named_compile_time_args) {
            named[name.c_str()] = value;
        }
        for (const auto& [name, value] : kernel.defines) {
            defines[name.c_str()] = value;
        }
        made["source"] = kernel.kernel_source;
        made["cores"] = ranges(kernel.core_ranges);
        made["compile_args"] = nb::cast(kernel.compile_time_args);
        made["named"] = named;
        made["defines"] = defines;
        made["args"] = args;
        made["common_args"] = nb::cast(kernel.common_runtime_args);
        made["config"] = config(kernel.config);
        made["include"] = nb::cast(kernel.compiler_include_paths);
        kernels.append(made);
    }
    for (const SemaphoreDescriptor& semaphore : program.semaphores) {
        semaphores.append(
            nb::make_tuple(semaphore.id, ranges(semaphore.core_ranges), semaphore.initial_value));
    }
    for (const CBDescriptor& cb : program.cbs) {
        nb::list formats;
        for (const CBFormatDescriptor& format : cb.format_descriptors) {
            formats.append(
                nb::make_tuple(format.buffer_index, static_cast<int>(format.data_format), format.page_size));
        }
        cbs.append(nb::make_tuple(cb.total_size, ranges(cb.core_ranges), formats));
    }
    nb::dict made;
    made["kernels"] = kernels;
    made["semaphores"] = semaphores;
    made["cbs"] = cbs;
    return made;
}

MemoryConfig place(bool dram, bool interleaved) {
    return MemoryConfig(interleaved ? TensorMemoryLayout::INTERLEAVED : TensorMemoryLayout::HEIGHT_SHARDED,
                        dram ? BufferType::DRAM : BufferType::L1);
}

}  // namespace

NB_MODULE(ttnn_stand_in, module) {
    nb::enum_<DataType>(module, "DataType")
        .value("bfloat16", DataType::BFLOAT16)
        .value("float32", DataType::FLOAT32)
        .value("uint32", DataType::UINT32)
        .value("bfloat8_b", DataType::BFLOAT8_B)
        .value("bfloat4_b", DataType::BFLOAT4_B)
        .value("int32", DataType::INT32);
    nb::enum_<MathFidelity>(module, "MathFidelity")
        .value("LoFi", MathFidelity::LoFi)
        .value("HiFi2", MathFidelity::HiFi2)
        .value("HiFi3", MathFidelity::HiFi3)
        .value("HiFi4", MathFidelity::HiFi4);
    nb::class_<SubDeviceId>(module, "SubDeviceId");
    nb::class_<MemoryConfig>(module, "MemoryConfig")
        .def(
            "__init__",
            [](MemoryConfig* self, bool dram, bool interleaved) {
                new (self) MemoryConfig(place(dram, interleaved));
            },
            "dram"_a = true, "interleaved"_a = true);
    nb::class_<ttnn::DeviceComputeKernelConfig>(module, "DeviceComputeKernelConfig")
        .def(nb::init<>())
        .def_rw("math_fidelity", &ttnn::DeviceComputeKernelConfig::math_fidelity)
        .def_rw("fp32_dest_acc_en", &ttnn::DeviceComputeKernelConfig::fp32_dest_acc_en)
        .def_rw("packer_l1_acc", &ttnn::DeviceComputeKernelConfig::packer_l1_acc)
        .def_rw("dst_full_sync_en", &ttnn::DeviceComputeKernelConfig::dst_full_sync_en);
    nb::class_<MeshDevice>(module, "Device")
        .def(
            "__init__",
            [](MeshDevice* self, const std::string& arch, std::pair<std::size_t, std::size_t> grid,
               std::uint32_t l1_bytes) {
                const auto kind = arch == "blackhole"     ? tt::ARCH::BLACKHOLE
                                  : arch == "wormhole_b0" ? tt::ARCH::WORMHOLE_B0
                                                          : tt::ARCH::GRAYSKULL;
                new (self) MeshDevice(kind, {grid.first, grid.second}, l1_bytes);
            },
            "arch"_a, "grid"_a, "l1_bytes"_a = 1572864)
        .def("add_sub_device",
             [](MeshDevice& self, const std::vector<std::array<std::size_t, 4>>& rectangles) {
                 std::vector<CoreRange> cores;
                 for (const auto& [x0, y0, x1, y1] : rectangles) {
                     cores.emplace_back(CoreCoord(x0, y0), CoreCoord(x1, y1));
                 }
                 self.sub_devices.emplace_back(std::move(cores));
                 return SubDeviceId(static_cast<std::uint8_t>(self.sub_devices.size() - 1));
             })
        .def_rw("keep", &MeshDevice::keep)
        .def_prop_ro("cache_entries", [](const MeshDevice& self) { return self.programs.size(); })
        .def_prop_ro("launched",
                     [](const MeshDevice& self) {
                         nb::list made;
                         for (const ProgramDescriptor& program : self.launched) {
                             made.append(in_python(program));
                         }
                         return made;
                     })
        .def_prop_ro("dram_banks", [](const MeshDevice& self) { return self.dram_grid_size().x; })
        .def("worker_core", [](const MeshDevice& self, std::size_t x, std::size_t y) {
            const CoreCoord core = self.worker_core_from_logical_core({x, y});
            return std::pair{core.x, core.y};
        });
    nb::class_<ttnn::Tensor>(module, "Tensor")
        .def_prop_ro("shape",
                     [](const ttnn::Tensor& self) {
                         nb::list sizes;
                         for (std::size_t i = 0; i < self.logical_shape().rank(); i++) {
                             sizes.append(self.logical_shape()[static_cast<int>(i)]);
                         }
                         return sizes;
                     })
        .def_prop_ro("dtype", &ttnn::Tensor::dtype)
        .def_prop_ro("tiled", [](const ttnn::Tensor& self) { return self.layout() == Layout::TILE; })
        .def("buffer_address", [](const ttnn::Tensor& self) { return self.buffer()->address(); })
        .def_prop_ro("accessor", [](const ttnn::Tensor& self) {
            return std::vector<std::uint64_t>{2, self.buffer()->page_size, self.buffer()->address()};
        });
    module.def(
        "tensor",
        [](MeshDevice* device, const std::vector<std::uint32_t>& shape, DataType dtype, bool tiled, bool dram,
           bool interleaved) -> ttnn::Tensor {
            const TensorSpec spec(Shape(shape),
                                  TensorLayout(dtype, PageConfig(tiled ? Layout::TILE : Layout::ROW_MAJOR),
                                               place(dram, interleaved)));
            return device == nullptr ? ttnn::Tensor(spec, nullptr, nullptr)
                                     : ttnn::create_device_tensor(spec, device);
        },
        "device"_a.none(), "shape"_a, "dtype"_a, "tiled"_a, "dram"_a = true, "interleaved"_a = true,
        nb::keep_alive<0, 1>());
}
