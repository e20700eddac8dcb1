// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string_view>
#include <tt-metalium/program_descriptors.hpp>
#include <utility>
#include <vector>

#include "planner/program.hpp"
#include "ttnn/tensor/tensor.hpp"

namespace tt::tt_metal {
class Program;
}

namespace ttnn::operations::experimental::moe {

// The tensors and numbers of one call, by the names that the plan has for them.
struct Call {
    std::vector<std::pair<std::string_view, std::reference_wrapper<const ttnn::Tensor>>> tensors;
    std::vector<std::pair<std::string_view, std::uint32_t>> scalars{};
};

// Folder with the kernels of every operator: device_kernels/.
void set_kernel_root(std::filesystem::path root);

// The plan for the tensors of a call, on their device or on every device of their mesh.
tt::tt_metal::ProgramDescriptor describe(const ::ttnn_moe::planner::Program& plan, const Call& call);

// Give a program that was made from the same plan the addresses and numbers of another call.
void rebind(tt::tt_metal::Program& program, const ::ttnn_moe::planner::Program& plan, const Call& call);

}  // namespace ttnn::operations::experimental::moe
