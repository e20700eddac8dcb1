// SPDX-License-Identifier: Apache-2.0
#include "ttnn_ops/common/descriptor.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <tt-metalium/host_api.hpp>
#include <tt-metalium/tensor_accessor_args.hpp>
#include <tt_stl/assert.hpp>
#include <utility>
#include <variant>
#include <vector>

#include "ttnn_ops/common/checks.hpp"
#include "ttnn_ops/common/compute_config.hpp"

namespace ttnn::operations::experimental::moe {

using namespace tt::tt_metal;
namespace planner = ::ttnn_moe::planner;

namespace {

std::filesystem::path& kernel_root() {
    static std::filesystem::path root = "device_kernels";
    return root;
}

// A call has a handful of them: a search is faster than a map, which allocates.
template <typename Named>
const auto& find(const Named& named, const std::string& name) {
    const auto found = std::ranges::find(named, name, [](const auto& one) { return one.first; });
    TT_FATAL(
        found != named.end(),
        "a plan asks for a value that the call has not; got {}; expected a tensor or number of the call.",
        name);
    return found->second;
}

const ttnn::Tensor& tensor_of(const Call& call, const planner::Placeholder& arg) {
    return find(call.tensors, arg.name).get();
}

std::uint32_t value_of(const planner::Arg& arg, const Call& call) {
    if (const auto* number = std::get_if<std::uint32_t>(&arg)) {
        return *number;
    }
    const auto& placeholder = std::get<planner::Placeholder>(arg);
    if (placeholder.kind == "address") {
        return static_cast<std::uint32_t>(tensor_of(call, placeholder).buffer()->address());
    }
    if (placeholder.kind == "scalar") {
        return find(call.scalars, placeholder.name);
    }
    // a coordinate of the grid: the same on every device of a mesh
    const auto* device = call.tensors.front().second.get().device();
    const bool across = placeholder.kind == "noc_x";
    const CoreCoord logical(across ? placeholder.index : 0, across ? 0 : placeholder.index);
    const CoreCoord core = device->worker_core_from_logical_core(logical);
    return static_cast<std::uint32_t>(across ? core.x : core.y);
}

// Cores as few rectangles: whole rows together, then what is left.
CoreRangeSet ranges_of(const std::vector<planner::Core>& cores) {
    std::map<std::uint32_t, std::pair<std::uint32_t, std::uint32_t>> rows;  // y: first x, last x
    for (const auto& [x, y] : cores) {
        auto& row = rows.try_emplace(y, x, x).first->second;
        row = {std::min(row.first, x), std::max(row.second, x)};
    }
    std::vector<CoreRange> found;
    for (const auto& [y, row] : rows) {
        if (!found.empty() && found.back().start_coord.x == row.first &&
            found.back().end_coord.x == row.second && found.back().end_coord.y + 1 == y) {
            found.back().end_coord.y = y;
        } else {
            found.emplace_back(CoreCoord(row.first, y), CoreCoord(row.second, y));
        }
    }
    return CoreRangeSet(std::move(found));
}

tt::DataFormat format_of(const std::string& name) {
    for (const DataType dtype : {DataType::BFLOAT16, DataType::FLOAT32, DataType::BFLOAT8_B,
                                 DataType::BFLOAT4_B, DataType::UINT32}) {
        if (name_of(dtype) == name) {
            return datatype_to_dataformat_converter(dtype);
        }
    }
    TT_THROW("a plan has a buffer of an unknown format; got {}; expected that of a tensor's dtype.", name);
}

ComputeConfigDescriptor compute_of(const planner::Kernel& kernel) {
    ComputeConfigDescriptor config;
    config.math_fidelity = fidelity_of(kernel.config.math_fidelity);
    config.math_approx_mode = kernel.config.approx;
    config.fp32_dest_acc_en = kernel.config.fp32_dest_acc;
    config.dst_full_sync_en = kernel.config.dst_full_sync;
    if (!kernel.config.unpack_to_dest_fp32.empty()) {
        config.unpack_to_dest_mode.assign(NUM_CIRCULAR_BUFFERS, UnpackToDestMode::Default);
        for (const std::uint32_t buffer : kernel.config.unpack_to_dest_fp32) {
            config.unpack_to_dest_mode.at(buffer) = UnpackToDestMode::UnpackToDestFp32;
        }
    }
    return config;
}

KernelDescriptor kernel_of(const planner::Kernel& kernel, const Call& call) {
    KernelDescriptor made;
    made.kernel_source = (kernel_root() / kernel.source).string();
    made.source_type = KernelDescriptor::SourceType::FILE_PATH;
    made.core_ranges = ranges_of(kernel.cores);
    for (const planner::Arg& arg : kernel.compile_args) {
        if (const auto* number = std::get_if<std::uint32_t>(&arg)) {
            made.compile_time_args.push_back(*number);
        } else {
            const ttnn::Tensor& tensor = tensor_of(call, std::get<planner::Placeholder>(arg));
            TensorAccessorArgs(*tensor.buffer()).append_to(made.compile_time_args);
        }
    }
    made.named_compile_time_args.assign(kernel.named_compile_args.begin(), kernel.named_compile_args.end());
    made.defines.assign(kernel.defines.begin(), kernel.defines.end());
    for (const auto& [core, args] : kernel.args) {
        KernelDescriptor::CoreRuntimeArgs own;
        for (const planner::Arg& arg : args) {
            own.push_back(value_of(arg, call));
        }
        made.runtime_args.emplace_back(CoreCoord(core.first, core.second), std::move(own));
    }
    for (const planner::Arg& arg : kernel.common_args) {
        made.common_runtime_args.push_back(value_of(arg, call));
    }
    if (kernel.role == "compute") {
        made.config = compute_of(kernel);
    } else if (kernel.role == "writer") {
        made.config = WriterConfigDescriptor{};
    } else {
        made.config = ReaderConfigDescriptor{};
    }
    made.compiler_include_paths.emplace_back(kernel_root());
    return made;
}

}  // namespace

void set_kernel_root(std::filesystem::path root) { kernel_root() = std::move(root); }

ProgramDescriptor describe(const planner::Program& plan, const Call& call) {
    ProgramDescriptor made;
    for (const planner::Kernel& kernel : plan.kernels) {
        made.kernels.push_back(kernel_of(kernel, call));
    }
    for (const planner::Semaphore& semaphore : plan.semaphores) {
        made.semaphores.push_back(SemaphoreDescriptor{.id = semaphore.id,
                                                      .core_ranges = ranges_of(semaphore.cores),
                                                      .initial_value = semaphore.initial});
    }
    for (const planner::CircularBuffer& buffer : plan.buffers) {
        CBDescriptor cb{.total_size = static_cast<std::uint32_t>(buffer.total_size),
                        .core_ranges = ranges_of(buffer.cores)};
        cb.format_descriptors.push_back(
            CBFormatDescriptor{.buffer_index = static_cast<std::uint8_t>(buffer.index),
                               .data_format = format_of(buffer.format),
                               .page_size = static_cast<std::uint32_t>(buffer.page_size)});
        made.cbs.push_back(std::move(cb));
    }
    return made;
}

void rebind(Program& program, const planner::Program& plan, const Call& call) {
    for (std::uint32_t k = 0; k < plan.kernels.size(); k++) {
        const std::vector<planner::Arg>& args = plan.kernels[k].common_args;
        if (args.empty()) {
            continue;
        }
        RuntimeArgsData& written = GetCommonRuntimeArgs(program, k);
        for (std::size_t i = 0; i < args.size(); i++) {
            const auto* placeholder = std::get_if<planner::Placeholder>(&args[i]);
            if (placeholder != nullptr && (placeholder->kind == "address" || placeholder->kind == "scalar")) {
                written[i] = value_of(args[i], call);
            }
        }
    }
}

}  // namespace ttnn::operations::experimental::moe
