// SPDX-License-Identifier: Apache-2.0
#include "planner/operators.hpp"
#include "planner/product.hpp"

namespace ttnn_moe::planner {
namespace {

// What a core's home buffer may take; less where the sums of many tokens leave less.
constexpr std::uint64_t kHomeBytes = 192 * 1024;

Program plan(const Problem& problem, const Machine& machine, std::uint64_t home_bytes, std::uint32_t ahead) {
    const Product product =
        make_product(problem, machine, problem.H / kTile, problem.I / kTile, 1, home_bytes, ahead);
    const std::string sums = "float32";
    const std::uint64_t bf16 = tile_bytes("bfloat16");
    const std::uint64_t sum = tile_bytes(sums);
    const std::uint64_t out = tile_bytes(problem.out_format);
    const std::uint64_t token_tiles = padded_tokens(problem) / kTile;
    // a block's tokens [32] uint32, its weights [32] bf16, its number of tokens
    const std::uint64_t ids_page = kTile * 4 + kTile * 2 + 64;

    ProductProgram made("down", product, problem, machine);
    made.buffer("table", 1, made.table_bytes, "uint32");
    made.buffer("plan_c", 1, made.plan_page, "uint32");
    made.buffer("plan_w", 1, made.plan_page, "uint32");
    made.buffer("home", 2 * product.slots * product.chunk, bf16, "bfloat16");
    made.buffer("x", 2 * product.k_max, bf16, "bfloat16");
    made.buffer("w", product.weight_tiles(), tile_bytes(problem.weight_format), problem.weight_format);
    std::vector<std::uint32_t> direct{made.buffer("part_in", product.partial_depth, sum, sums)};
    made.buffer("part_out", 2, sum, sums);
    made.buffer("ids", 2, ids_page, "uint32");
    made.buffer("scale", 2, bf16, "bfloat16");
    constexpr std::uint64_t old_pages = 2;
    direct.push_back(made.buffer("old", old_pages, sum, sums));
    made.number("old_pages", old_pages);
    made.semaphore("sem_added");
    made.buffer("new", 2, sum, sums);
    direct.push_back(
        made.buffer("sum", std::max<std::uint64_t>(product.finished_max, 1) * token_tiles, sum, sums));
    const std::uint32_t out_in = made.buffer("out_in", 2, out, problem.out_format);
    if (problem.out_format == sums) {
        direct.push_back(out_in);
    }
    made.buffer("out", 2, out, problem.out_format);
    made.buffer("done", 1, 64, "uint32");
    made.number("sum_tile_bytes", sum);
    made.number("out_tile_bytes", out);

    made.mover("reader",
               {"num_routed_tokens", "device_expert_mapping", "routed_tokens", "routed_token_weights",
                "activations"},
               {padded_tokens(problem), scalar("token_tiles")});
    const std::vector<Arg> call{scalar("token_tiles"), scalar("accumulate")};
    made.mover("writer", {"weight_0", "out"}, call);
    made.compute(call, direct);
    return made.program();
}

}  // namespace

Program plan_down(const Problem& problem, const Machine& machine) {
    check(problem, machine);
    return plan_to_fit(machine, "down", kHomeBytes, [&](std::uint64_t home_bytes, std::uint32_t ahead) {
        return plan(problem, machine, home_bytes, ahead);
    });
}

}  // namespace ttnn_moe::planner
