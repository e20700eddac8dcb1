// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>
#include <string>

#include "planner/operators.hpp"
#include "planner/product.hpp"

namespace ttnn_moe::planner {
namespace {

// What a core's home buffer may take; less where a core's share of the weights leaves less.
constexpr std::uint64_t kHomeBytes = 256 * 1024;

Program plan(const Problem& problem, const Machine& machine, std::uint32_t weights, std::uint64_t home_bytes,
             std::uint32_t ahead) {
    const Product product =
        make_product(problem, machine, problem.I / kTile, problem.H / kTile, weights, home_bytes, ahead);
    const std::string sums = "float32";
    const std::uint64_t bf16 = tile_bytes("bfloat16");
    const std::uint64_t sum = tile_bytes(sums);

    ProductProgram made("gate_up", product, problem, machine);
    made.buffer("table", 1, made.table_bytes, "uint32");
    made.buffer("ids", 1, kTile * 4, "uint32");
    made.buffer("plan_c", 1, made.plan_page, "uint32");
    made.buffer("plan_w", 1, made.plan_page, "uint32");
    made.buffer("rows", 2 * product.chunk, bf16, "bfloat16");
    made.buffer("home", 2 * product.slots * product.chunk, bf16, "bfloat16");
    made.buffer("x", 2 * product.k_max, bf16, "bfloat16");
    made.buffer("w", product.weight_tiles(), tile_bytes(problem.weight_format), problem.weight_format);
    const std::uint32_t part_in = made.buffer("part_in", product.partial_depth * weights, sum, sums);
    made.buffer("part_out", 2 * weights, sum, sums);
    made.buffer("out", 2, bf16, "bfloat16");

    made.mover("reader", {"num_routed_tokens", "device_expert_mapping", "routed_tokens", "hidden"},
               {padded_tokens(problem)});
    made.mover("writer", {"weight_0", weights == 2 ? "weight_1" : "weight_0", "out"}, {});
    made.compute({}, {part_in});
    return made.program();
}

}  // namespace

Program plan_gate_up(const Problem& problem, const Machine& machine, std::uint32_t weights) {
    check(problem, machine);
    if (weights != 1 && weights != 2) {
        throw std::invalid_argument("gate_up has 1 or 2 weights, not " + std::to_string(weights));
    }
    return plan_to_fit(machine, "gate_up", kHomeBytes, [&](std::uint64_t home_bytes, std::uint32_t ahead) {
        return plan(problem, machine, weights, home_bytes, ahead);
    });
}

}  // namespace ttnn_moe::planner
