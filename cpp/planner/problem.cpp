// SPDX-License-Identifier: Apache-2.0
#include "planner/problem.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string_view>

namespace ttnn_moe::planner {
namespace {

using std::literals::operator""sv;

struct Weights {
    std::string_view format;
    std::string_view fidelity;
};

constexpr std::array kWeights{Weights{"bfloat16", "HiFi4"}, Weights{"bfloat8_b", "HiFi3"},
                              Weights{"bfloat4_b", "HiFi3"}};
constexpr std::array kFidelities{"LoFi"sv, "HiFi2"sv, "HiFi3"sv, "HiFi4"sv};

}  // namespace

std::string default_fidelity(const std::string& weight_format) {
    const auto* found = std::ranges::find(kWeights, weight_format, &Weights::format);
    if (found == kWeights.end()) {
        throw std::invalid_argument("weights are bfloat16, bfloat8_b or bfloat4_b, not '" + weight_format +
                                    "'");
    }
    return std::string(found->fidelity);
}

void check(const Problem& p, const Machine& machine) {
    const auto refuse = [](const std::string& what) { throw std::invalid_argument(what); };
    if (p.T == 0 || p.E == 0 || p.E_local == 0 || p.K == 0) {
        refuse("nothing to plan: T, E, E_local and K must be at least 1 (a call with T = 0 runs no program)");
    }
    if (p.E_local > p.E) {
        refuse("E_local = " + std::to_string(p.E_local) + " exceeds E = " + std::to_string(p.E));
    }
    if (p.H == 0 || p.I == 0 || p.H % kTile != 0 || p.I % kTile != 0) {
        refuse("H and I must be multiples of 32, the side of a tile; got H = " + std::to_string(p.H) +
               ", I = " + std::to_string(p.I));
    }
    default_fidelity(p.weight_format);
    if (!p.math_fidelity.empty() && std::ranges::find(kFidelities, p.math_fidelity) == kFidelities.end()) {
        refuse("a math fidelity is LoFi, HiFi2, HiFi3 or HiFi4, not '" + p.math_fidelity + "'");
    }
    if (p.out_format != "bfloat16" && p.out_format != "float32") {
        refuse("the output is bfloat16 or float32, not '" + p.out_format + "'");
    }
    if (machine.grid.cores() == 0 || machine.min_tiles == 0 || machine.dram_banks == 0) {
        refuse("a program needs at least one core and one DRAM bank, and a core at least one tile");
    }
    for (const auto& [x, y] : machine.bank_cores) {
        if (x >= machine.grid.x || y > machine.grid.y) {
            refuse("the core next to a DRAM bank is outside of the grid");
        }
    }
}

}  // namespace ttnn_moe::planner
