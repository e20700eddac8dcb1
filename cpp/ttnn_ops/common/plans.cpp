// SPDX-License-Identifier: Apache-2.0
#include "ttnn_ops/common/plans.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>

#include "planner/operators.hpp"
#include "ttnn_ops/common/checks.hpp"

namespace ttnn::operations::experimental::moe {
namespace {

planner::Program make(const std::string& name, const planner::Problem& problem,
                      const planner::Machine& machine) {
    if (name == "routing") {
        return planner::plan_routing(problem, machine);
    }
    if (name == "silu_mul") {
        return planner::plan_silu_mul(problem, machine);
    }
    if (name == "down") {
        return planner::plan_down(problem, machine);
    }
    return planner::plan_gate_up(problem, machine, name == "gate_up" ? 2 : 1);
}

}  // namespace

planner::Machine machine_of(const ttnn::Tensor& tensor) {
    const auto* device = tensor.device();
    const bool blackhole = device->arch() == tt::ARCH::BLACKHOLE;
    if (!blackhole && device->arch() != tt::ARCH::WORMHOLE_B0) {
        refuse("the device is of an unknown architecture", "another one", "wormhole_b0 or blackhole");
    }
    // Wormhole's simulator does not unpack to DST: see device.py of ttnn_moe.tenstorrent.
    static const bool simulated = std::getenv("TT_METAL_SIMULATOR") != nullptr;
    const std::string_view arch = blackhole ? "blackhole" : "wormhole_b0";
    const auto grid = device->compute_with_storage_grid_size();
    return {.grid = {static_cast<std::uint32_t>(grid.x), static_cast<std::uint32_t>(grid.y)},
            .l1_bytes = std::ranges::find(planner::chips(), arch, &planner::Chip::arch)->l1_bytes,
            .unpack_to_dest = blackhole || !simulated,
            .dram_banks = static_cast<std::uint32_t>(device->dram_grid_size().x)};
}

const planner::Program& plan(const std::string& name, const planner::Problem& problem,
                             const planner::Machine& machine) {
    static std::mutex mutex;
    static std::map<std::tuple<std::string, planner::Problem, planner::Machine>, planner::Program> made;
    const std::scoped_lock lock(mutex);
    const auto key = std::make_tuple(name, problem, machine);
    auto found = made.find(key);
    if (found == made.end()) {
        try {
            found = made.emplace(key, make(name, problem, machine)).first;
        } catch (const std::invalid_argument& error) {
            refuse("no program of " + name + " for these sizes",
                   "T <= " + std::to_string(problem.T) + ", E = " + std::to_string(problem.E) +
                       ", E_local = " + std::to_string(problem.E_local) +
                       ", K = " + std::to_string(problem.K) + ", H = " + std::to_string(problem.H) +
                       ", I = " + std::to_string(problem.I),
                   error.what());
        }
    }
    return found->second;
}

std::uint32_t bound_of(std::uint32_t T) { return std::max(planner::kTile, std::bit_ceil(T)); }

std::uint32_t rows_of(const planner::Problem& problem) {
    return std::max(planner::max_blocks(problem), 1u) * planner::kTile;
}

}  // namespace ttnn::operations::experimental::moe
