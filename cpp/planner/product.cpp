// SPDX-License-Identifier: Apache-2.0
#include "planner/product.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "planner/near.hpp"

namespace ttnn_moe::planner {
namespace {

constexpr std::uint32_t kChunkTiles = 8;

// tt-metal's max_runtime_args: of a kernel on a core, its own and the common ones.
constexpr std::size_t kMostRuntimeArgs = 341;

}  // namespace

std::uint32_t tile_bytes(const std::string& format) {
    if (format == "bfloat16") {
        return 2048;
    }
    if (format == "float32") {
        return 4096;
    }
    if (format == "bfloat8_b") {
        return 1088;  // 1024 signs and magnitudes of 7 bits, 64 exponents
    }
    if (format == "bfloat4_b") {
        return 576;  // of 3 bits
    }
    throw std::invalid_argument("no tile format is called '" + format + "'");
}

std::uint32_t weight_run(const std::string& format, bool by_bank, std::uint32_t expert_tiles,
                         std::uint32_t banks) {
    const std::uint32_t packet = 8192 / tile_bytes(format);
    if (by_bank && (banks == 0 || expert_tiles == 0)) {
        throw std::invalid_argument("by_bank needs expert_tiles and banks of 1 or more");
    }
    return by_bank && expert_tiles % banks == 0 ? expert_tiles / banks : packet;
}

std::vector<Core> first_cores(Grid grid, std::uint32_t n) {
    std::vector<Core> cores;
    for (std::uint32_t i = 0; i < n; i++) {
        cores.emplace_back(i % grid.x, i / grid.x);
    }
    return cores;
}

void append_noc(std::vector<Arg>& args, Grid grid, std::uint32_t cores) {
    for (std::uint32_t x = 0; x < grid.x; x++) {
        args.push_back(Placeholder{"noc_x", "", x});
    }
    for (std::uint32_t y = 0; y < ceil_div(cores, grid.x); y++) {
        args.push_back(Placeholder{"noc_y", "", y});
    }
}

Placeholder address_of(const std::string& tensor) { return {"address", tensor}; }
Placeholder accessor_of(const std::string& tensor) { return {"accessor", tensor}; }
Placeholder scalar(const std::string& name) { return {"scalar", name}; }

std::map<std::string, std::uint32_t> Product::named_args() const {
    return {{"columns", columns},
            {"k_tiles", k_tiles},
            {"weights", weights},
            {"k_max", k_max},
            {"chunk", chunk},
            {"chunks", chunks},
            {"slots", slots},
            {"window", window},
            {"cores", static_cast<std::uint32_t>(cores.size())},
            {"weights_ahead", weights_ahead}};
}

std::map<Core, std::vector<Arg>> Product::core_args() const {
    std::map<Core, std::vector<Arg>> args;
    for (std::uint32_t at = 0; at < line.size(); at++) {
        const std::uint32_t i = line[at];
        std::vector<Arg>& own = args[cores[i]];
        own.emplace_back(i);
        own.emplace_back(static_cast<std::uint32_t>(shares[i].size()));
        own.emplace_back(at == 0 ? i : line[at - 1]);
        own.emplace_back(at + 1 == line.size() ? i : line[at + 1]);
        for (const Piece& piece : shares[i]) {
            own.insert(own.end(), {piece.column, piece.begin, piece.end});
        }
    }
    return args;
}

Product make_product(const Problem& problem, const Machine& machine, std::uint32_t columns,
                     std::uint32_t k_tiles, std::uint32_t weights, std::uint64_t home_bytes,
                     std::uint32_t ahead) {
    Product p{.columns = columns, .k_tiles = k_tiles, .weights = weights};
    const std::uint32_t tiles = columns * k_tiles;
    const auto lengths = split(columns, k_tiles, machine.grid.cores(), machine.min_tiles);
    const auto cores = static_cast<std::uint32_t>(lengths.size());
    p.cores = first_cores(machine.grid, cores);
    p.run = weight_run(problem.weight_format, problem.banked, tiles, machine.dram_banks);
    std::vector<std::uint32_t> taken(cores);
    std::iota(taken.begin(), taken.end(), 0);
    if (problem.banked && tiles % machine.dram_banks == 0 &&
        machine.bank_cores.size() == machine.dram_banks) {
        taken = lengths_near_banks(lengths, tiles, k_tiles, p.cores, machine.grid, machine.bank_cores);
    }
    p.line.resize(cores);
    for (std::uint32_t i = 0; i < cores; i++) {
        p.shares.push_back(lengths[taken[i]]);
        p.line[taken[i]] = i;
    }
    for (const auto& share : p.shares) {
        std::uint32_t length = 0;
        std::uint32_t finished = 0;
        for (const Piece& piece : share) {
            length += piece.end - piece.begin;
            finished += piece.end == k_tiles;
        }
        p.k_max = std::max(p.k_max, length);
        p.finished_max = std::max(p.finished_max, finished);
    }
    p.weights_ahead = p.can_read_ahead() ? ahead : 1;
    p.chunk = std::min(kChunkTiles, k_tiles);
    p.chunks = ceil_div(k_tiles, p.chunk);
    const std::uint64_t slot_bytes = std::uint64_t{p.chunk} * tile_bytes("bfloat16");
    const std::uint64_t units = std::uint64_t{max_blocks(problem)} * p.chunks;
    const std::uint64_t least = ceil_div(p.chunks, cores);  // a window holds at least one block
    const std::uint64_t room = std::max<std::uint64_t>(home_bytes / (2 * slot_bytes), 1);
    p.slots = std::max(least, std::min(room, ceil_div(units, cores)));
    p.window = std::uint64_t{p.slots} * cores / p.chunks;
    return p;
}

ProductProgram::ProductProgram(std::string name, const Product& product, const Problem& problem,
                               const Machine& machine)
    : name_(std::move(name)),
      product_(product),
      problem_(problem),
      machine_(machine),
      named_(product.named_args()) {
    const std::uint64_t mapping_offset = round_up(problem.E * 4, 64);
    table_bytes = mapping_offset + round_up(problem.E_local * 4, 64);
    plan_page = round_up((2 + 3 * problem.E_local) * 4, 64);
    named_.insert({{"experts", problem.E},
                   {"local_experts", problem.E_local},
                   {"grid_columns", machine.grid.x},
                   {"mapping_offset", mapping_offset},
                   {"weight_tile_bytes", tile_bytes(problem.weight_format)},
                   {"weight_run", product.run},
                   {"dram_banks", machine.dram_banks},
                   {"partial_bytes", product.weights * tile_bytes("float32")},
                   {"partial_depth", product.partial_depth}});
    for (const char* semaphore : {"sem_scheduled", "sem_arrived", "sem_go", "sem_partial", "sem_credit"}) {
        this->semaphore(semaphore);
    }
}

void ProductProgram::semaphore(const std::string& name) {
    const auto id = static_cast<std::uint32_t>(program_.semaphores.size());
    program_.semaphores.push_back({id, 0, product_.cores});
    named_[name] = id;
}

std::uint32_t ProductProgram::buffer(const std::string& name, std::uint64_t pages, std::uint64_t page,
                                     const std::string& format) {
    const auto index = static_cast<std::uint32_t>(program_.buffers.size());
    program_.buffers.push_back({index, pages * page, page, format, product_.cores});
    named_["cb_" + name] = index;
    return index;
}

void ProductProgram::mover(const std::string& file, const std::vector<std::string>& tensors,
                           const std::vector<Arg>& scalars) {
    Kernel made{.source = name_ + "/" + file + ".cpp",
                .role = file == "writer" ? "reader" : "writer",
                .cores = product_.cores};
    for (const std::string& tensor : tensors) {
        made.compile_args.push_back(accessor_of(tensor));
        made.common_args.push_back(address_of(tensor));
    }
    made.common_args.insert(made.common_args.end(), scalars.begin(), scalars.end());
    append_noc(made.common_args, machine_.grid, product_.cores.size());
    made.named_compile_args = named_;
    made.args = product_.core_args();
    program_.kernels.push_back(made);
}

void ProductProgram::compute(const std::vector<Arg>& scalars,
                             const std::vector<std::uint32_t>& unpack_to_dest_fp32) {
    Kernel made{.source = name_ + "/compute.cpp", .role = "compute", .cores = product_.cores};
    made.named_compile_args = named_;
    made.common_args = scalars;
    made.args = product_.core_args();
    made.config.math_fidelity =
        problem_.math_fidelity.empty() ? default_fidelity(problem_.weight_format) : problem_.math_fidelity;
    made.config.fp32_dest_acc = problem_.fp32_dest;
    if (machine_.unpack_to_dest && problem_.fp32_dest) {
        made.config.unpack_to_dest_fp32 = unpack_to_dest_fp32;
    }
    program_.kernels.push_back(made);
}

void check_fits(const Program& program, const Machine& machine, const std::string& what) {
    if (program.l1_bytes() > machine.usable_l1()) {
        throw std::invalid_argument(what + " does not fit a core's L1: its buffers need " +
                                    std::to_string(program.l1_bytes()) + " bytes of " +
                                    std::to_string(machine.usable_l1()) +
                                    "; plan for fewer tokens, weights of fewer bits, or a larger grid");
    }
    for (const Kernel& kernel : program.kernels) {
        for (const auto& [core, own] : kernel.args) {
            const std::size_t args = own.size() + kernel.common_args.size();
            if (args > kMostRuntimeArgs) {
                throw std::invalid_argument(what + " has too many pieces a core: " + kernel.source +
                                            " needs " + std::to_string(args) + " runtime arguments of " +
                                            std::to_string(kMostRuntimeArgs) +
                                            "; plan for smaller experts, or a larger grid");
            }
        }
    }
}

Program plan_to_fit(const Machine& machine, const std::string& what, std::uint64_t home_bytes,
                    const std::function<Program(std::uint64_t home_bytes, std::uint32_t ahead)>& plan) {
    const auto fits = [&](const Program& program) { return program.l1_bytes() <= machine.usable_l1(); };
    Program program = plan(home_bytes, Product::kMostAhead);
    if (!fits(program)) {
        program = plan(home_bytes, 1);
    }
    if (!fits(program)) {
        program = plan(0, 1);
        check_fits(program, machine, what);
        for (std::uint64_t less = home_bytes / 2; less != 0; less /= 2) {
            if (Program larger = plan(less, 1); fits(larger)) {
                program = std::move(larger);
                break;
            }
        }
    }
    check_fits(program, machine, what);
    return program;
}

}  // namespace ttnn_moe::planner
