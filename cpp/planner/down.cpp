#include "planner/operators.hpp"
#include "planner/product.hpp"

namespace ttnn_moe::planner {
namespace {

// What a core's home buffer may take; less where the sums of many tokens leave less.
constexpr std::uint64_t kHomeBytes = 192 * 1024;
constexpr std::uint64_t kLeastHomeBytes = 32 * 1024;

enum Buffer : std::uint32_t {
    kTable,
    kPlanC,
    kPlanW,
    kHome,
    kX,
    kW,
    kPartIn,
    kPartOut,
    kIds,
    kScale,
    kOld,
    kNew,
    kSum,
    kOutIn,
    kOut,
    kDone,
};
enum Sem : std::uint32_t { kArrived, kGo, kPartial, kCredit };

Program plan(const Problem& problem, const Machine& machine, std::uint64_t home_bytes) {
    const Product product =
        make_product(problem, machine, problem.H / kTile, problem.I / kTile, 1, home_bytes);
    const std::vector<Core>& cores = product.cores;
    const std::string sums = "float32";
    const std::uint64_t bf16 = tile_bytes("bfloat16");
    const std::uint64_t sum = tile_bytes(sums);
    const std::uint64_t out = tile_bytes(problem.out_format);
    const std::uint64_t weight = tile_bytes(problem.weight_format);
    const std::uint64_t token_tiles = padded_tokens(problem) / kTile;

    Program program;
    const auto buffer = [&](Buffer index, std::uint64_t pages, std::uint64_t page,
                            const std::string& format) {
        program.buffers.push_back({index, pages * page, page, format, cores});
    };
    const std::uint64_t mapping_offset = round_up(problem.E * 4, 64);
    const std::uint64_t plan_page = round_up((2 + 3 * problem.E_local) * 4, 64);
    // a block's tokens [32] uint32, its weights [32] bf16, its number of tokens
    const std::uint64_t ids_page = kTile * 4 + kTile * 2 + 64;
    buffer(kTable, 1, mapping_offset + round_up(problem.E_local * 4, 64), "uint32");
    buffer(kPlanC, 1, plan_page, "uint32");
    buffer(kPlanW, 1, plan_page, "uint32");
    buffer(kHome, 2 * product.slots * product.chunk, bf16, "bfloat16");
    buffer(kX, 2 * product.k_max, bf16, "bfloat16");
    buffer(kW, 2 * product.k_max, weight, problem.weight_format);
    buffer(kPartIn, product.partial_depth, sum, sums);
    buffer(kPartOut, 2, sum, sums);
    buffer(kIds, 2, ids_page, "uint32");
    buffer(kScale, 2, bf16, "bfloat16");
    buffer(kOld, 2, sum, sums);
    buffer(kNew, 2, sum, sums);
    buffer(kSum, std::max<std::uint64_t>(product.finished_max, 1) * token_tiles, sum, sums);
    buffer(kOutIn, 2, out, problem.out_format);
    buffer(kOut, 2, out, problem.out_format);
    buffer(kDone, 1, 64, "uint32");
    for (const Sem sem : {kArrived, kGo, kPartial, kCredit}) {
        program.semaphores.push_back({sem, 0, cores});
    }

    std::map<std::string, std::uint32_t> named = product.named_args();
    named.insert({{"experts", problem.E},
                  {"local_experts", problem.E_local},
                  {"grid_columns", machine.grid.x},
                  {"mapping_offset", mapping_offset},
                  {"weight_tile_bytes", weight},
                  {"partial_bytes", sum},
                  {"partial_depth", product.partial_depth},
                  {"sum_tile_bytes", sum},
                  {"out_tile_bytes", out},
                  {"token_tiles", token_tiles},
                  {"sem_arrived", kArrived},
                  {"sem_go", kGo},
                  {"sem_partial", kPartial},
                  {"sem_credit", kCredit},
                  {"cb_table", kTable},
                  {"cb_plan_c", kPlanC},
                  {"cb_plan_w", kPlanW},
                  {"cb_home", kHome},
                  {"cb_x", kX},
                  {"cb_w", kW},
                  {"cb_part_in", kPartIn},
                  {"cb_part_out", kPartOut},
                  {"cb_ids", kIds},
                  {"cb_scale", kScale},
                  {"cb_old", kOld},
                  {"cb_new", kNew},
                  {"cb_sum", kSum},
                  {"cb_out_in", kOutIn},
                  {"cb_out", kOut},
                  {"cb_done", kDone}});
    const auto kernel = [&](const std::string& role, const std::vector<std::string>& tensors,
                            const std::vector<Arg>& scalars) {
        return product.kernel("down", role, named, tensors, scalars);
    };
    program.kernels.push_back(kernel("reader",
                                     {"num_routed_tokens", "device_expert_mapping", "routed_tokens",
                                      "routed_token_weights", "activations"},
                                     {padded_tokens(problem)}));
    program.kernels.push_back(
        kernel("writer", {"weight_0", "out"}, {scalar("token_tiles"), scalar("accumulate")}));
    for (Kernel& made : program.kernels) {
        append_noc(made.common_args, machine.grid, cores.size());
    }
    Kernel compute = kernel("compute", {}, {scalar("token_tiles"), scalar("accumulate")});
    compute.config.fp32_dest_acc = true;
    if (machine.unpack_to_dest) {
        compute.config.unpack_to_dest_fp32 = {kPartIn, kOld, kSum};
        if (problem.out_format == "float32") {
            compute.config.unpack_to_dest_fp32.push_back(kOutIn);
        }
    }
    program.kernels.push_back(compute);
    return program;
}

}  // namespace

Program plan_down(const Problem& problem, const Machine& machine) {
    check(problem, machine);
    std::uint64_t home_bytes = kHomeBytes;
    Program program = plan(problem, machine, home_bytes);
    while (program.l1_bytes() > machine.usable_l1() && home_bytes > kLeastHomeBytes) {
        home_bytes /= 2;
        program = plan(problem, machine, home_bytes);
    }
    check_l1(program, machine, "down");
    return program;
}

}  // namespace ttnn_moe::planner
