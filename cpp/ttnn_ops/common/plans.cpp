// SPDX-License-Identifier: Apache-2.0
#include "ttnn_ops/common/plans.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tt-metalium/hal_types.hpp>
#include <tt_stl/assert.hpp>
#include <tuple>

#include "planner/operators.hpp"

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

// A plan counts cores from (0, 0), row by row, and multicasts to rectangles of them.
planner::Grid cores_of(const ttnn::Tensor& tensor, const tt::tt_metal::SubDeviceId& subdevice_id) {
    const auto cores =
        tensor.device()->worker_cores(tt::tt_metal::HalProgrammableCoreType::TENSIX, subdevice_id);
    const auto box = cores.bounding_box();
    const planner::Grid grid{static_cast<std::uint32_t>(box.end_coord.x + 1),
                             static_cast<std::uint32_t>(box.end_coord.y + 1)};
    TT_FATAL(box.start_coord.x == 0 && box.start_coord.y == 0 && cores.num_cores() == grid.cores(),
             "the sub-device is no rectangle of cores from (0, 0); got {} cores from ({}, {}) to ({}, {}); "
             "expected all cores from (0, 0) on.",
             cores.num_cores(), box.start_coord.x, box.start_coord.y, box.end_coord.x, box.end_coord.y);
    return grid;
}

}  // namespace

planner::Machine machine_of(const ttnn::Tensor& tensor, const SubDevice& subdevice_id) {
    const auto* device = tensor.device();
    const bool blackhole = device->arch() == tt::ARCH::BLACKHOLE;
    TT_FATAL(blackhole || device->arch() == tt::ARCH::WORMHOLE_B0,
             "the device is of an unknown architecture; got another one; expected wormhole_b0 or blackhole.");
    // Wormhole's simulator does not unpack to DST: see device.py of ttnn_moe.tenstorrent.
    static const char* const simulator = std::getenv("TT_METAL_SIMULATOR");
    const bool simulated = simulator != nullptr && *simulator != '\0';
    const auto grid = device->compute_with_storage_grid_size();
    const planner::Grid all{static_cast<std::uint32_t>(grid.x), static_cast<std::uint32_t>(grid.y)};
    return {.grid = subdevice_id.has_value() ? cores_of(tensor, *subdevice_id) : all,
            .l1_bytes = device->l1_size_per_core(),
            .unpack_to_dest = blackhole || !simulated,
            .dram_banks = static_cast<std::uint32_t>(device->dram_grid_size().x)};
}

std::uint64_t key_of(const ttnn::Tensor& tensor, const SubDevice& subdevice_id) {
    if (!subdevice_id.has_value() || tensor.storage_type() != ttnn::StorageType::DEVICE) {
        return 0;
    }
    const planner::Grid grid = cores_of(tensor, *subdevice_id);
    return (std::uint64_t{grid.x} << 32) | grid.y;
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
            TT_THROW(
                "no program of {} for these sizes; got T <= {}, E = {}, E_local = {}, K = {}, H = {}, "
                "I = {}; expected {}.",
                name, problem.T, problem.E, problem.E_local, problem.K, problem.H, problem.I, error.what());
        }
    }
    return found->second;
}

std::uint32_t bound_of(std::uint32_t T) { return std::max(planner::kTile, std::bit_ceil(T)); }

std::uint32_t rows_of(const planner::Problem& problem) {
    return std::max(planner::max_blocks(problem), 1u) * planner::kTile;
}

}  // namespace ttnn::operations::experimental::moe
