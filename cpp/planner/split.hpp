// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace ttnn_moe::planner {

// Tiles (column, k) with begin <= k < end of a product's right operand.
struct Piece {
    std::uint32_t column;
    std::uint32_t begin;
    std::uint32_t end;

    bool operator==(const Piece&) const = default;
};

// Share the columns * k_tiles tiles of a product among at most `cores` cores. The line of all tiles, column
// by column, is cut into lengths that differ by at most one tile. A length is at least min_tiles, unless a
// core would get more than a column. A core's pieces are in the order of its work: first the piece whose sum
// it passes on without waiting, last the piece that waits for the core before.
std::vector<std::vector<Piece>> split(std::uint32_t columns, std::uint32_t k_tiles, std::uint32_t cores,
                                      std::uint32_t min_tiles);

}  // namespace ttnn_moe::planner
