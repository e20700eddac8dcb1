// SPDX-License-Identifier: Apache-2.0
#include "planner/chips.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

namespace ttnn_moe::planner {
namespace {

constexpr std::uint64_t GiB = 1ull << 30;

// Where each column is from (github.com/tenstorrent/tt-metal, docs.tenstorrent.com):
//   tensix    tt_metal/soc_descriptors/{wormhole_b0_80,blackhole_140}_arch.yaml, functional_workers: 8x10 and
//             14x10; less the harvested rows that tt_metal/llrt/core_descriptor.hpp, get_product_name, gives
//             a Wormhole product: n150 is nebula_x1 (one), n300 is nebula_x2 (two).
//   compute   tt_metal/core_descriptors/{wormhole_b0_80,blackhole_140}_arch.yaml,
//             compute_with_storage_grid_range: Tensix dispatch takes a row on Wormhole, a column on
//             Blackhole.
//   l1        soc_descriptors, worker_l1_size.
//   dram      soc_descriptors: Wormhole 12 views of 1 GiB; Blackhole 8 banks of dram_bank_size.
//   bandwidth and clock
//             aibs/wormhole/specifications, aibs/blackhole/specifications (n300: half of the board's 576
//             GB/s).
constexpr std::array<Chip, 3> kChips{{
    {.name = "n150",
     .arch = "wormhole_b0",
     .chips_per_board = 1,
     .tensix = {8, 9},
     .compute = {8, 8},
     .l1_bytes = 1499136,
     .dram_bytes = 12 * GiB,
     .dram_banks = 12,
     .dram_bytes_per_s = 288'000'000'000,
     .clock_hz = 1'000'000'000},
    {.name = "n300",
     .arch = "wormhole_b0",
     .chips_per_board = 2,
     .tensix = {8, 8},
     .compute = {8, 7},
     .l1_bytes = 1499136,
     .dram_bytes = 12 * GiB,
     .dram_banks = 12,
     .dram_bytes_per_s = 288'000'000'000,
     .clock_hz = 1'000'000'000},
    {.name = "p150",
     .arch = "blackhole",
     .chips_per_board = 1,
     .tensix = {14, 10},
     .compute = {13, 10},
     .l1_bytes = 1572864,
     .dram_bytes = 8 * 4278190080ull,
     .dram_banks = 8,
     .dram_bytes_per_s = 512'000'000'000,
     .clock_hz = 1'350'000'000},
}};

}  // namespace

std::span<const Chip> chips() { return kChips; }

const Chip& find_chip(std::string_view name) {
    const auto found = std::ranges::find(kChips, name, &Chip::name);
    if (found != kChips.end()) {
        return *found;
    }
    std::string known;
    for (const Chip& chip : kChips) {
        known += (known.empty() ? "" : ", ") + std::string(chip.name);
    }
    throw std::invalid_argument("no chip is called '" + std::string(name) +
                                "'; programs can be planned for: " + known);
}

}  // namespace ttnn_moe::planner
