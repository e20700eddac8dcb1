// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace ttnn_moe::planner {

// A value that is known only when a program is run.
//   "address"   the DRAM address of the tensor called name
//   "accessor"  the compile-time arguments of a TensorAccessor of the tensor called name (several numbers)
//   "scalar"    the number called name
//   "noc_x"     the NoC x of column `index` of the grid;  "noc_y"  the NoC y of row `index`
struct Placeholder {
    std::string kind;
    std::string name;
    std::uint32_t index = 0;

    bool operator==(const Placeholder&) const = default;
};

using Arg = std::variant<std::uint32_t, Placeholder>;
using Core = std::pair<std::uint32_t, std::uint32_t>;  // (x, y), logical

struct ComputeConfig {
    std::string math_fidelity = "HiFi4";
    bool fp32_dest_acc = false;
    bool approx = false;
    bool dst_full_sync = false;
    std::vector<std::uint32_t> unpack_to_dest_fp32;  // circular buffers that unpack to DST without a detour
};

struct Kernel {
    std::string source{};  // below device_kernels/
    std::string role{};    // "reader", "writer", "compute"
    std::vector<Core> cores{};
    std::vector<Arg> compile_args{};
    std::map<std::string, std::uint32_t> named_compile_args{};
    std::map<std::string, std::string> defines{};
    std::vector<Arg> common_args{};
    std::map<Core, std::vector<Arg>> args{};
    ComputeConfig config{};  // role "compute" only
};

struct CircularBuffer {
    std::uint32_t index;
    std::uint64_t total_size;
    std::uint64_t page_size;
    std::string format;
    std::vector<Core> cores;
};

struct Semaphore {
    std::uint32_t id;
    std::uint32_t initial;
    std::vector<Core> cores;
};

struct Program {
    std::vector<Kernel> kernels;
    std::vector<CircularBuffer> buffers;
    std::vector<Semaphore> semaphores;

    std::uint64_t l1_bytes() const {
        std::uint64_t sum = 0;
        for (const CircularBuffer& buffer : buffers) {
            sum += buffer.total_size;
        }
        return sum;
    }
};

}  // namespace ttnn_moe::planner
