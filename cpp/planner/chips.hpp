// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <string_view>

namespace ttnn_moe::planner {

// Columns and rows of Tensix cores; x counts columns, as tt-metal's CoreCoord does.
struct Grid {
    std::uint32_t x;
    std::uint32_t y;

    constexpr std::uint32_t cores() const { return x * y; }
    auto operator<=>(const Grid&) const = default;
};

// One chip of a board as a program sees it. A board with harvested rows or columns beyond its kind's can have
// fewer cores than `compute`: with a device at hand, what the device says holds.
struct Chip {
    std::string_view name;  // board that carries it: "n150", "n300", "p150"
    std::string_view arch;  // tt-metal's architecture name: "wormhole_b0", "blackhole"
    std::uint32_t chips_per_board;
    Grid tensix;               // Tensix cores that are not harvested
    Grid compute;              // of these, what is left to programs beside the dispatch cores
    std::uint64_t l1_bytes;    // L1 of one Tensix core, before what firmware and kernels' code take
    std::uint64_t dram_bytes;  // of one chip
    std::uint32_t dram_banks;  // that tensors are interleaved over
    std::uint64_t dram_bytes_per_s;
    std::uint64_t clock_hz;
};

// Every chip that programs can be planned for, in order of name.
std::span<const Chip> chips();

// The chip of that name. Throws std::invalid_argument that lists the known names.
const Chip& find_chip(std::string_view name);

}  // namespace ttnn_moe::planner
