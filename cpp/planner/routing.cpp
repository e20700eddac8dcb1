// SPDX-License-Identifier: Apache-2.0
#include "planner/operators.hpp"
#include "planner/product.hpp"

namespace ttnn_moe::planner {
namespace {

// A core gets at least this many tokens.
constexpr std::uint64_t kLeastTokens = 8;

enum Buffer : std::uint32_t { kTable, kInput, kRecord, kPulled, kRow };
enum Sem : std::uint32_t { kArrived };

}  // namespace

Program plan_routing(const Problem& problem, const Machine& machine) {
    check(problem, machine);
    const std::uint64_t all = machine.grid.cores();
    const std::uint64_t share = std::max(kLeastTokens, ceil_div(problem.T, all));
    // cores that read tokens, and cores that each write some experts' rows
    const std::uint64_t readers = ceil_div(problem.T, share);
    const std::uint64_t owners = std::min<std::uint64_t>(problem.E_local, all);
    const std::vector<Core> cores = first_cores(machine.grid, std::max(readers, owners));

    // What a core found (its record): counts of all local experts, then for each its tokens and weights.
    const std::uint64_t counts_bytes = round_up(problem.E_local * 4, 64);
    const std::uint64_t list_bytes = round_up(share * 4, 64);
    const std::uint64_t record_bytes = counts_bytes + problem.E_local * 2 * list_bytes;
    const std::uint64_t page_bytes = round_up(problem.K * 4, 64);
    // what an owner pulls from a reader at a time: its counts, one expert's tokens and weights
    const std::uint64_t pulled_bytes = counts_bytes + 2 * list_bytes;
    const std::uint64_t mapping_offset = round_up(problem.E * 4, 64);
    const std::uint64_t tokens = padded_tokens(problem);

    Program program;
    const auto buffer = [&](Buffer index, std::uint64_t page) {
        program.buffers.push_back({index, page, page, "uint32", cores});
    };
    buffer(kTable, mapping_offset + round_up(problem.E_local * 4, 64));
    buffer(kInput, 2 * share * page_bytes);
    buffer(kRecord, record_bytes);
    buffer(kPulled, readers * pulled_bytes);
    // a row of tokens, a row of weights, the counts of all experts, the mapping
    buffer(kRow, tokens * 4 + tokens * 2 + mapping_offset + round_up(problem.E_local * 4, 64));
    program.semaphores.push_back({kArrived, 0, cores});

    Kernel reader{.source = "routing/reader.cpp", .role = "reader", .cores = cores};
    reader.named_compile_args = {{"experts", problem.E},
                                 {"local_experts", problem.E_local},
                                 {"k", problem.K},
                                 {"share", share},
                                 {"readers", readers},
                                 {"owners", owners},
                                 {"grid_columns", machine.grid.x},
                                 {"row_tokens", tokens},
                                 {"page_bytes", page_bytes},
                                 {"counts_bytes", counts_bytes},
                                 {"list_bytes", list_bytes},
                                 {"mapping_offset", mapping_offset},
                                 {"sem_arrived", kArrived},
                                 {"cb_table", kTable},
                                 {"cb_input", kInput},
                                 {"cb_record", kRecord},
                                 {"cb_pulled", kPulled},
                                 {"cb_row", kRow}};
    for (std::uint32_t i = 0; i < cores.size(); i++) {
        reader.args[cores[i]] = {i};
    }
    Kernel writer = reader;
    writer.source = "routing/writer.cpp";
    writer.role = "writer";
    for (const char* tensor : {"topk_ids", "topk_weights", "device_expert_mapping"}) {
        reader.compile_args.push_back(accessor_of(tensor));
        reader.common_args.push_back(address_of(tensor));
    }
    reader.common_args.push_back(scalar("T"));
    append_noc(reader.common_args, machine.grid, cores.size());
    for (const char* tensor :
         {"device_expert_mapping", "num_routed_tokens", "routed_tokens", "routed_token_weights"}) {
        writer.compile_args.push_back(accessor_of(tensor));
        writer.common_args.push_back(address_of(tensor));
    }
    append_noc(writer.common_args, machine.grid, cores.size());
    program.kernels = {reader, writer};
    check_fits(program, machine, "routing");
    return program;
}

}  // namespace ttnn_moe::planner
