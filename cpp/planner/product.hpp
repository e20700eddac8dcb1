// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "planner/problem.hpp"
#include "planner/program.hpp"
#include "planner/split.hpp"

namespace ttnn_moe::planner {

// Bytes of a 32x32 tile. Throws std::invalid_argument for a format that is not known.
std::uint32_t tile_bytes(const std::string& format);

// Tiles of a weight matrix that lie side by side in a DRAM bank, before the next bank has its turn: as many
// as one packet of Wormhole's NoC holds. By bank: what each of the banks gets of an expert of expert_tiles,
// if they can share it evenly.
std::uint32_t weight_run(const std::string& format, bool by_bank = false, std::uint32_t expert_tiles = 0,
                         std::uint32_t banks = 0);

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
    std::uint32_t weights{};                   // right operands that share a split: gate and up
    std::uint32_t k_max{};                     // tiles of the largest share
    std::uint32_t finished_max{};              // columns that one core finishes, at most
    std::vector<std::vector<Piece>> shares{};  // of each core
    std::vector<std::uint32_t> line{};         // the cores in the order of their shares on the line
    std::vector<Core> cores{};
    std::uint32_t run{};  // tiles of weights side by side in a bank
    // Homes of the left operand
    std::uint32_t chunk{};
    std::uint32_t chunks{};
    std::uint32_t slots{};
    std::uint32_t window{};
    std::uint32_t partial_depth = 2;
    std::uint32_t weights_ahead = 1;  // experts whose weights are under way at a time

    // Pages of the buffer of weights: those of the expert that is worked on, and of those under way.
    std::uint32_t weight_tiles() const { return (weights_ahead + 1) * k_max * weights; }
    // Two experts, where the counter of a transaction id holds the packets of one.
    static constexpr std::uint32_t kMostAhead = 2;
    bool can_read_ahead() const { return k_max * weights <= 255; }

    std::map<std::string, std::uint32_t> named_args() const;
    std::map<Core, std::vector<Arg>> core_args() const;
};

// Split a product and place its left operand, of which up to home_bytes may be held by a core. Weights of
// `ahead` experts are under way, if transaction ids allow.
Product make_product(const Problem& problem, const Machine& machine, std::uint32_t columns,
                     std::uint32_t k_tiles, std::uint32_t weights, std::uint64_t home_bytes,
                     std::uint32_t ahead);

// A product's program as it is put together. What is declared (buffers, in the order in which they lie in L1,
// semaphores, numbers) every kernel added after it knows by name.
class ProductProgram {
  public:
    ProductProgram(std::string name, const Product& product, const Problem& problem, const Machine& machine);

    std::uint32_t buffer(const std::string& name, std::uint64_t pages, std::uint64_t page,
                         const std::string& format);
    void semaphore(const std::string& name);
    void number(const std::string& name, std::uint32_t value) { named_[name] = value; }

    // A kernel that moves data: file reader.cpp, which brings the left operand, or writer.cpp, which brings
    // weights and takes results away. The grid's NoC coordinates follow its scalars.
    //
    // Weights are most of the bytes, and reads of DRAM load NoC 0's links the least. So writer.cpp has the
    // role that runs on NoC 0, "reader", and reader.cpp the other one.
    void mover(const std::string& file, const std::vector<std::string>& tensors,
               const std::vector<Arg>& scalars);
    void compute(const std::vector<Arg>& scalars, const std::vector<std::uint32_t>& unpack_to_dest_fp32);

    const Program& program() const { return program_; }

    std::uint64_t table_bytes{};  // num_routed_tokens, then device_expert_mapping
    std::uint64_t plan_page{};    // a schedule: see device_kernels/common/schedule.hpp

  private:
    std::string name_;
    const Product& product_;
    const Problem& problem_;
    const Machine& machine_;
    std::map<std::string, std::uint32_t> named_;
    Program program_;
};

// Throws std::invalid_argument if a program's buffers, or a kernel's runtime arguments, exceed what a core
// has.
void check_fits(const Program& program, const Machine& machine, const std::string& what);

// The first of these that fits L1: plan(home_bytes, kMostAhead), plan(home_bytes, 1), then with a half, a
// quarter .. of home_bytes, down to one slot a core, or as many as one block takes.
// Throws as check_fits where none does.
Program plan_to_fit(const Machine& machine, const std::string& what, std::uint64_t home_bytes,
                    const std::function<Program(std::uint64_t home_bytes, std::uint32_t ahead)>& plan);

}  // namespace ttnn_moe::planner
