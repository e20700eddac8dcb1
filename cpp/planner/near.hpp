// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "planner/chips.hpp"
#include "planner/program.hpp"
#include "planner/split.hpp"

namespace ttnn_moe::planner {

// Where the cores stand that read a product's weights by bank: of each core of `cores`, the length of the
// line that it takes. Bank b holds the b-th of equal parts of the line of `tiles` tiles.
//
// Weights come on NoC 0, right and then down. The NoC is taken for the columns of cores, a column of routers
// left of each column of bank_cores, and the rows of cores. bank_cores has the core to the right of each
// bank; row grid.y is one more row of routers below the cores. Lengths change places as long as the sum over
// links of load^4 falls: that keeps the busiest links low.
std::vector<std::uint32_t> lengths_near_banks(const std::vector<std::vector<Piece>>& lengths,
                                              std::uint32_t tiles, std::uint32_t k_tiles,
                                              const std::vector<Core>& cores, Grid grid,
                                              const std::vector<Core>& bank_cores);

}  // namespace ttnn_moe::planner
