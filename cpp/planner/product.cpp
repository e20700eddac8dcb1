#include "planner/product.hpp"

#include <algorithm>
#include <stdexcept>

namespace ttnn_moe::planner {
namespace {

constexpr std::uint32_t kChunkTiles = 8;

}  // namespace

std::uint32_t tile_bytes(const std::string& format) {
    if (format == "bfloat16") {
        return 2048;
    }
    if (format == "float32") {
        return 4096;
    }
    if (format == "bfloat8_b") {
        return 1088;  // 1024 mantissas and signs, 64 exponents
    }
    throw std::invalid_argument("no tile format is called '" + format + "'");
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
    return {{"columns", columns}, {"k_tiles", k_tiles}, {"weights", weights},
            {"k_max", k_max},     {"chunk", chunk},     {"chunks", chunks},
            {"slots", slots},     {"window", window},   {"cores", static_cast<std::uint32_t>(cores.size())}};
}

std::map<Core, std::vector<Arg>> Product::core_args() const {
    std::map<Core, std::vector<Arg>> args;
    for (std::uint32_t i = 0; i < cores.size(); i++) {
        std::vector<Arg>& own = args[cores[i]];
        own.emplace_back(i);
        own.emplace_back(static_cast<std::uint32_t>(shares[i].size()));
        for (const Piece& piece : shares[i]) {
            own.insert(own.end(), {piece.column, piece.begin, piece.end});
        }
    }
    return args;
}

Kernel Product::kernel(const std::string& name, const std::string& role,
                       const std::map<std::string, std::uint32_t>& named,
                       const std::vector<std::string>& tensors, const std::vector<Arg>& scalars) const {
    Kernel made{.source = name + "/" + role + ".cpp", .role = role, .cores = cores};
    for (const std::string& tensor : tensors) {
        made.compile_args.push_back(accessor_of(tensor));
        made.common_args.push_back(address_of(tensor));
    }
    made.common_args.insert(made.common_args.end(), scalars.begin(), scalars.end());
    made.named_compile_args = named;
    made.args = core_args();
    return made;
}

Product make_product(const Problem& problem, const Machine& machine, std::uint32_t columns,
                     std::uint32_t k_tiles, std::uint32_t weights, std::uint64_t home_bytes) {
    Product p{.columns = columns, .k_tiles = k_tiles, .weights = weights};
    p.shares = split(columns, k_tiles, machine.grid.cores(), machine.min_tiles);
    const auto cores = static_cast<std::uint32_t>(p.shares.size());
    p.cores = first_cores(machine.grid, cores);
    for (const auto& share : p.shares) {
        std::uint32_t tiles = 0;
        std::uint32_t finished = 0;
        for (const Piece& piece : share) {
            tiles += piece.end - piece.begin;
            finished += piece.end == k_tiles;
        }
        p.k_max = std::max(p.k_max, tiles);
        p.finished_max = std::max(p.finished_max, finished);
    }
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

void check_l1(const Program& program, const Machine& machine, const std::string& what) {
    if (program.l1_bytes() > machine.usable_l1()) {
        throw std::invalid_argument(
            what + " does not fit a core's L1: its buffers need " + std::to_string(program.l1_bytes()) +
            " bytes of " + std::to_string(machine.usable_l1()) + "; plan for fewer tokens, or a larger grid");
    }
}

}  // namespace ttnn_moe::planner
