// SPDX-License-Identifier: Apache-2.0
#include "planner/problem.hpp"

#include <stdexcept>

namespace ttnn_moe::planner {

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
    if (p.weight_format != "bfloat16" && p.weight_format != "bfloat8_b") {
        refuse("weights are bfloat16 or bfloat8_b, not '" + p.weight_format + "'");
    }
    if (p.out_format != "bfloat16" && p.out_format != "float32") {
        refuse("the output is bfloat16 or float32, not '" + p.out_format + "'");
    }
    if (machine.grid.cores() == 0 || machine.min_tiles == 0 || machine.dram_banks == 0) {
        refuse("a program needs at least one core and one DRAM bank, and a core at least one tile");
    }
}

}  // namespace ttnn_moe::planner
