// SPDX-License-Identifier: Apache-2.0
#include "planner/near.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace ttnn_moe::planner {
namespace {

constexpr int kMostRounds = 50;

struct Router {
    std::uint32_t x;
    std::uint32_t y;
};

class Torus {
  public:
    Torus(Grid grid, const std::vector<Core>& bank_cores) : first_(grid.x), columns_(grid.x), rows_(grid.y) {
        std::vector<bool> has_banks(grid.x);
        for (const Core& core : bank_cores) {
            has_banks[core.first] = true;
            rows_ = std::max(rows_, core.second + 1);
        }
        std::uint32_t before = 0;
        for (std::uint32_t x = 0; x < grid.x; x++) {
            before += has_banks[x] ? 1 : 0;
            first_[x] = x + before;
        }
        columns_ += before;
    }
    std::uint32_t links() const { return 2 * columns_ * rows_; }
    Router of_core(const Core& core) const { return {first_[core.first], core.second}; }
    Router of_bank(const Core& bank_core) const { return {first_[bank_core.first] - 1, bank_core.second}; }

    // The links from one router to another: those to the right, then those down.
    std::vector<std::uint32_t> route(Router from, Router to) const {
        std::vector<std::uint32_t> links;
        for (; from.x != to.x; from.x = (from.x + 1) % columns_) {
            links.push_back(2 * (from.y * columns_ + from.x));
        }
        for (; from.y != to.y; from.y = (from.y + 1) % rows_) {
            links.push_back(2 * (from.y * columns_ + from.x) + 1);
        }
        return links;
    }

  private:
    std::vector<std::uint32_t> first_;  // of each column of cores
    std::uint32_t columns_;
    std::uint32_t rows_;
};

// Tiles of a length that each bank holds, for the banks that hold any.
using OfBanks = std::vector<std::pair<std::uint32_t, std::int64_t>>;

OfBanks of_banks(const std::vector<Piece>& length, std::uint32_t tiles, std::uint32_t k_tiles,
                 std::uint32_t banks) {
    std::vector<std::int64_t> count(banks);
    for (const Piece& piece : length) {
        for (std::uint32_t k = piece.begin; k < piece.end; k++) {
            count[(std::uint64_t{piece.column} * k_tiles + k) * banks / tiles]++;
        }
    }
    OfBanks made;
    for (std::uint32_t bank = 0; bank < banks; bank++) {
        if (count[bank] != 0) {
            made.emplace_back(bank, count[bank]);
        }
    }
    return made;
}

// Exact for loads of any product that has a program: std::int64_t overflows from 55,109 tiles on.
__extension__ using Cost = unsigned __int128;

Cost fourth(std::int64_t load) {
    const Cost squared = static_cast<Cost>(load) * static_cast<Cost>(load);
    return squared * squared;
}

}  // namespace

std::vector<std::uint32_t> lengths_near_banks(const std::vector<std::vector<Piece>>& lengths,
                                              std::uint32_t tiles, std::uint32_t k_tiles,
                                              const std::vector<Core>& cores, Grid grid,
                                              const std::vector<Core>& bank_cores) {
    const auto banks = static_cast<std::uint32_t>(bank_cores.size());
    const Torus torus(grid, bank_cores);
    std::vector<OfBanks> held;
    for (const auto& length : lengths) {
        held.push_back(of_banks(length, tiles, k_tiles, banks));
    }
    std::vector<std::vector<std::vector<std::uint32_t>>> routes(cores.size());
    for (std::size_t core = 0; core < cores.size(); core++) {
        for (const Core& bank : bank_cores) {
            routes[core].push_back(torus.route(torus.of_bank(bank), torus.of_core(cores[core])));
        }
    }
    std::vector<std::int64_t> load(torus.links());
    Cost cost = 0;
    const auto add = [&](std::size_t core, std::uint32_t length, std::int64_t sign) {
        for (const auto& [bank, count] : held[length]) {
            for (const std::uint32_t link : routes[core][bank]) {
                cost -= fourth(load[link]);
                load[link] += sign * count;
                cost += fourth(load[link]);
            }
        }
    };
    std::vector<std::uint32_t> taken(cores.size());
    for (std::uint32_t core = 0; core < cores.size(); core++) {
        taken[core] = core;
        add(core, core, 1);
    }
    const auto exchange = [&](std::size_t a, std::size_t b) {
        add(a, taken[a], -1);
        add(b, taken[b], -1);
        std::swap(taken[a], taken[b]);
        add(a, taken[a], 1);
        add(b, taken[b], 1);
    };
    bool better = true;
    for (int round = 0; better && round < kMostRounds; round++) {
        better = false;
        for (std::size_t a = 0; a < cores.size(); a++) {
            for (std::size_t b = a + 1; b < cores.size(); b++) {
                const Cost before = cost;
                exchange(a, b);
                if (cost < before) {
                    better = true;
                } else {
                    exchange(a, b);
                }
            }
        }
    }
    return taken;
}

}  // namespace ttnn_moe::planner
