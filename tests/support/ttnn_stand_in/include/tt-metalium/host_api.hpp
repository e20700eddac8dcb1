// SPDX-License-Identifier: Apache-2.0
// Stand-in: of tt-metal's header only what cpp/ttnn_ops uses.
#pragma once

#include <cstdint>

#include "tt-metalium/program_descriptors.hpp"

namespace tt::tt_metal {

using KernelHandle = std::uint32_t;

struct RuntimeArgsData {
    std::uint32_t* rt_args_data;
    std::size_t rt_args_count;

    std::uint32_t& operator[](std::size_t index) { return rt_args_data[index]; }
};

class Program {
  public:
    Program(const ProgramDescriptor& descriptor);

    ProgramDescriptor descriptor;
    mutable std::vector<RuntimeArgsData> common_args;
};

RuntimeArgsData& GetCommonRuntimeArgs(const Program& program, KernelHandle kernel_id);

}  // namespace tt::tt_metal
