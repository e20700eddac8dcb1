#include "planner/operators.hpp"
#include "planner/product.hpp"

namespace ttnn_moe::planner {
namespace {

// What a core's home buffer may take: at T = 4096 a window is then all blocks of a uniform routing.
constexpr std::uint64_t kHomeBytes = 256 * 1024;

enum Buffer : std::uint32_t { kTable, kIds, kPlanC, kPlanW, kRows, kHome, kX, kW, kPartIn, kPartOut, kOut };
enum Sem : std::uint32_t { kArrived, kGo, kPartial, kCredit };

}  // namespace

Program plan_gate_up(const Problem& problem, const Machine& machine, std::uint32_t weights) {
    check(problem, machine);
    const Product product =
        make_product(problem, machine, problem.I / kTile, problem.H / kTile, weights, kHomeBytes);
    const std::vector<Core>& cores = product.cores;
    const std::string sums = "float32";
    const std::uint64_t bf16 = tile_bytes("bfloat16");
    const std::uint64_t sum = tile_bytes(sums);
    const std::uint64_t weight = tile_bytes(problem.weight_format);

    Program program;
    const auto buffer = [&](Buffer index, std::uint64_t pages, std::uint64_t page,
                            const std::string& format) {
        program.buffers.push_back({index, pages * page, page, format, cores});
    };
    const std::uint64_t mapping_offset = round_up(problem.E * 4, 64);
    const std::uint64_t plan_page = round_up((2 + 3 * problem.E_local) * 4, 64);
    buffer(kTable, 1, mapping_offset + round_up(problem.E_local * 4, 64), "uint32");
    buffer(kIds, 1, kTile * 4, "uint32");
    buffer(kPlanC, 1, plan_page, "uint32");
    buffer(kPlanW, 1, plan_page, "uint32");
    buffer(kRows, 2 * product.chunk, bf16, "bfloat16");
    buffer(kHome, 2 * product.slots * product.chunk, bf16, "bfloat16");
    buffer(kX, 2 * product.k_max, bf16, "bfloat16");
    buffer(kW, 2 * product.k_max * weights, weight, problem.weight_format);
    buffer(kPartIn, product.partial_depth * weights, sum, sums);
    buffer(kPartOut, 2 * weights, sum, sums);
    buffer(kOut, 2, bf16, "bfloat16");
    for (const Sem sem : {kArrived, kGo, kPartial, kCredit}) {
        program.semaphores.push_back({sem, 0, cores});
    }

    std::map<std::string, std::uint32_t> named = product.named_args();
    named.insert({{"experts", problem.E},
                  {"local_experts", problem.E_local},
                  {"grid_columns", machine.grid.x},
                  {"mapping_offset", mapping_offset},
                  {"weight_tile_bytes", weight},
                  {"partial_bytes", weights * sum},
                  {"partial_depth", product.partial_depth},
                  {"sem_arrived", kArrived},
                  {"sem_go", kGo},
                  {"sem_partial", kPartial},
                  {"sem_credit", kCredit},
                  {"cb_table", kTable},
                  {"cb_ids", kIds},
                  {"cb_plan_c", kPlanC},
                  {"cb_plan_w", kPlanW},
                  {"cb_rows", kRows},
                  {"cb_home", kHome},
                  {"cb_x", kX},
                  {"cb_w", kW},
                  {"cb_part_in", kPartIn},
                  {"cb_part_out", kPartOut},
                  {"cb_out", kOut}});
    const auto kernel = [&](const std::string& role, const std::vector<std::string>& tensors,
                            const std::vector<Arg>& scalars) {
        return product.kernel("gate_up", role, named, tensors, scalars);
    };
    program.kernels.push_back(
        kernel("reader", {"num_routed_tokens", "device_expert_mapping", "routed_tokens", "hidden"},
               {padded_tokens(problem)}));
    program.kernels.push_back(
        kernel("writer", {"weight_0", weights == 2 ? "weight_1" : "weight_0", "out"}, {}));
    for (Kernel& made : program.kernels) {
        append_noc(made.common_args, machine.grid, cores.size());
    }
    Kernel compute = kernel("compute", {}, {});
    compute.config.fp32_dest_acc = true;
    if (machine.unpack_to_dest) {
        compute.config.unpack_to_dest_fp32 = {kPartIn};
    }
    program.kernels.push_back(compute);
    check_l1(program, machine, "gate_up");
    return program;
}

}  // namespace ttnn_moe::planner
