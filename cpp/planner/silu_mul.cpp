// SPDX-License-Identifier: Apache-2.0
#include "planner/operators.hpp"
#include "planner/product.hpp"

namespace ttnn_moe::planner {
namespace {

enum Buffer : std::uint32_t { kGate, kUp, kOut };

}  // namespace

Program plan_silu_mul(const Problem& problem, const Machine& machine) {
    check(problem, machine);
    const std::uint64_t tiles = std::uint64_t{max_blocks(problem)} * (problem.I / kTile);
    const std::uint64_t used =
        std::min<std::uint64_t>(machine.grid.cores(), std::max<std::uint64_t>(tiles, 1));
    const std::vector<Core> cores = first_cores(machine.grid, used);
    const std::uint64_t bf16 = tile_bytes("bfloat16");

    Program program;
    for (const Buffer index : {kGate, kUp, kOut}) {
        program.buffers.push_back({index, 2 * bf16, bf16, "bfloat16", cores});
    }
    const auto kernel = [&](const std::string& role, const std::vector<std::string>& tensors) {
        Kernel made{.source = "silu_mul/" + role + ".cpp", .role = role, .cores = cores};
        for (const std::string& tensor : tensors) {
            made.compile_args.push_back(accessor_of(tensor));
            made.common_args.push_back(address_of(tensor));
        }
        made.named_compile_args = {{"cb_gate", kGate}, {"cb_up", kUp}, {"cb_out", kOut}};
        for (std::uint64_t i = 0; i < used; i++) {
            made.args[cores[i]] = {static_cast<std::uint32_t>(tiles * i / used),
                                   static_cast<std::uint32_t>(tiles * (i + 1) / used)};
        }
        return made;
    };
    program.kernels = {kernel("reader", {"gate", "up"}), kernel("writer", {"out"}), kernel("compute", {})};
    program.kernels.back().config.fp32_dest_acc = true;
    check_fits(program, machine, "silu_mul");
    return program;
}

}  // namespace ttnn_moe::planner
