// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "planner/chips.hpp"

namespace ttnn_moe::planner {

inline constexpr std::uint32_t kTile = 32;

// Sizes that a plan is made for. T is a bound: one plan serves every call of up to T tokens, and every
// routing.
struct Problem {
    std::uint32_t T;
    std::uint32_t E;        // experts of all devices
    std::uint32_t E_local;  // experts of this device
    std::uint32_t K;
    std::uint32_t H;
    std::uint32_t I;
    std::string weight_format = "bfloat16";  // of the planned operator: bfloat16, bfloat8_b or bfloat4_b
    std::string out_format = "bfloat16";     // or "float32"
    std::string math_fidelity{};             // LoFi, HiFi2, HiFi3 or HiFi4; empty: default_fidelity
    bool fp32_dest = true;                   // DST holds fp32; else bf16
    bool banked = false;                     // a bank holds one part of every expert's weights: weight_run

    auto operator<=>(const Problem&) const = default;
};

// What a program may use of a chip.
struct Machine {
    Grid grid;
    std::uint64_t l1_bytes;
    // true: fp32 buffers are unpacked to DST unchanged. false: they pass through SrcA, which cuts them to
    // TF32. Sums are fp32 in both cases.
    bool unpack_to_dest = true;
    // a core gets at least this many tiles of a product
    std::uint32_t min_tiles = 4;
    // DRAM banks that tensors are interleaved over
    std::uint32_t dram_banks = 8;
    // of each bank, the (x, y) of the core to its right; y = grid.y: it stands below the cores; empty: not
    // known
    std::vector<std::pair<std::uint32_t, std::uint32_t>> bank_cores{};

    auto operator<=>(const Machine&) const = default;

    // L1 of a core for circular buffers; firmware, kernels, their arguments and stacks take the rest.
    std::uint64_t usable_l1() const { return l1_bytes > kL1Margin ? l1_bytes - kL1Margin : 0; }
    // In ttnn 0.81 that is 104 KiB on Wormhole, 110 KiB on Blackhole.
    static constexpr std::uint64_t kL1Margin = 128 * 1024;
};

constexpr std::uint64_t ceil_div(std::uint64_t a, std::uint64_t b) { return (a + b - 1) / b; }
constexpr std::uint64_t round_up(std::uint64_t a, std::uint64_t b) { return ceil_div(a, b) * b; }

// Tokens of the routing's tensors: T rounded up to whole blocks of 32.
constexpr std::uint32_t padded_tokens(const Problem& p) { return round_up(p.T, kTile); }

// Blocks of 32 rows that any routing of T tokens can give one device.
constexpr std::uint32_t max_blocks(const Problem& p) {
    const std::uint64_t pairs = std::uint64_t{p.T} * p.K;
    const std::uint64_t experts = std::min<std::uint64_t>(p.E_local, pairs);
    return std::min((pairs + (kTile - 1) * experts) / kTile, p.E_local * ceil_div(p.T, kTile));
}

// The fewest phases of products with weights of a format that lose nothing that HiFi4 keeps.
// docs/tenstorrent.md has the error of each fidelity.
std::string default_fidelity(const std::string& weight_format);

// Throws std::invalid_argument for sizes that cannot be planned.
void check(const Problem& problem, const Machine& machine);

}  // namespace ttnn_moe::planner
