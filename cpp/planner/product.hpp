#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "planner/problem.hpp"
#include "planner/program.hpp"
#include "planner/split.hpp"

namespace ttnn_moe::planner {

// Bytes of a 32x32 tile. Throws std::invalid_argument for a format that is not known.
std::uint32_t tile_bytes(const std::string& format);

// The first n cores of a grid, row by row.
std::vector<Core> first_cores(Grid grid, std::uint32_t n);

// Placeholders for a grid's NoC coordinates, in the order that device_kernels/common/grid.hpp reads.
void append_noc(std::vector<Arg>& args, Grid grid, std::uint32_t cores);

Placeholder address_of(const std::string& tensor);
Placeholder accessor_of(const std::string& tensor);
Placeholder scalar(const std::string& name);

// One of the operators' matrix products, as split, homes.hpp and chain.hpp see it.
struct Product {
    std::uint32_t columns{};
    std::uint32_t k_tiles{};
    std::uint32_t weights{};       // right operands that share a split: gate and up
    std::uint32_t k_max{};         // tiles of the largest share
    std::uint32_t finished_max{};  // columns that one core finishes, at most
    std::vector<std::vector<Piece>> shares{};
    std::vector<Core> cores{};
    // Homes of the left operand
    std::uint32_t chunk{};
    std::uint32_t chunks{};
    std::uint32_t slots{};
    std::uint32_t window{};
    std::uint32_t partial_depth = 2;

    std::map<std::string, std::uint32_t> named_args() const;
    std::map<Core, std::vector<Arg>> core_args() const;

    // A kernel of operator `name` on these cores: accessors and addresses of its tensors, then its scalars.
    Kernel kernel(const std::string& name, const std::string& role,
                  const std::map<std::string, std::uint32_t>& named, const std::vector<std::string>& tensors,
                  const std::vector<Arg>& scalars) const;
};

// Split a product and place its left operand, of which up to home_bytes may be held by a core.
Product make_product(const Problem& problem, const Machine& machine, std::uint32_t columns,
                     std::uint32_t k_tiles, std::uint32_t weights, std::uint64_t home_bytes);

// Throws std::invalid_argument if a program's buffers exceed what a core has.
void check_l1(const Program& program, const Machine& machine, const std::string& what);

}  // namespace ttnn_moe::planner
