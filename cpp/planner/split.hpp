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

// Share the columns * k_tiles tiles of a product among at most `cores` cores: the line of all tiles, column
// by column, is cut into equal lengths that differ by at most one tile, of at least min_tiles where that
// leaves no core with more than a column. Each core's pieces come in the order in which it works on them:
// first the one whose sum it passes on without waiting for another's, last the one that waits for the core
// before.
std::vector<std::vector<Piece>> split(std::uint32_t columns, std::uint32_t k_tiles, std::uint32_t cores,
                                      std::uint32_t min_tiles);

}  // namespace ttnn_moe::planner
