// SPDX-License-Identifier: Apache-2.0
// Stand-in: of tt-metal's header only what cpp/ttnn_ops uses.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tt-metalium/core_coord.hpp"
#include "tt-metalium/tensor_types.hpp"

inline constexpr std::uint32_t NUM_CIRCULAR_BUFFERS = 64;

namespace tt::tt_metal {

enum class MathFidelity : std::uint8_t { LoFi = 0, HiFi2 = 2, HiFi3 = 3, HiFi4 = 4 };
enum class UnpackToDestMode : std::uint8_t { UnpackToDestFp32, Default };

struct CBFormatDescriptor {
    std::uint8_t buffer_index = 0;
    tt::DataFormat data_format = tt::DataFormat::Float32;
    std::uint32_t page_size = 0;
};

struct CBDescriptor {
    std::uint32_t total_size = 0;
    CoreRangeSet core_ranges;
    std::vector<CBFormatDescriptor> format_descriptors;
};

enum class CoreType { WORKER };

struct SemaphoreDescriptor {
    std::uint32_t id{};
    CoreType core_type = CoreType::WORKER;
    CoreRangeSet core_ranges;
    std::uint32_t initial_value = 0;
};

struct ReaderConfigDescriptor {};
struct WriterConfigDescriptor {};
struct DataMovementConfigDescriptor {};
struct ComputeConfigDescriptor {
    MathFidelity math_fidelity = MathFidelity::HiFi4;
    bool fp32_dest_acc_en = false;
    bool dst_full_sync_en = false;
    std::vector<UnpackToDestMode> unpack_to_dest_mode;
    bool bfp8_pack_precise = false;
    bool math_approx_mode = false;
};

struct KernelDescriptor {
    using CoreRuntimeArgs = std::vector<std::uint32_t>;
    using ConfigDescriptor = std::variant<ReaderConfigDescriptor, WriterConfigDescriptor,
                                          DataMovementConfigDescriptor, ComputeConfigDescriptor>;
    enum class SourceType { FILE_PATH, SOURCE_CODE };

    std::string kernel_source;
    SourceType source_type = SourceType::FILE_PATH;
    CoreRangeSet core_ranges;
    std::vector<std::uint32_t> compile_time_args;
    std::vector<std::pair<std::string, std::uint32_t>> named_compile_time_args;
    std::vector<std::pair<std::string, std::string>> defines;
    std::vector<std::pair<CoreCoord, CoreRuntimeArgs>> runtime_args;
    CoreRuntimeArgs common_runtime_args;
    ConfigDescriptor config;
    std::vector<std::filesystem::path> compiler_include_paths;
};

struct ProgramDescriptor {
    std::vector<KernelDescriptor> kernels;
    std::vector<SemaphoreDescriptor> semaphores;
    std::vector<CBDescriptor> cbs;
};

}  // namespace tt::tt_metal
