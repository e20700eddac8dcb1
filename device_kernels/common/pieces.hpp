// SPDX-License-Identifier: Apache-2.0
// A core's share of a matrix product: pieces (column, k0, k1) of the line of all (column, k) tiles, column by
// column.
//
// A column that several cores share is summed along them: the core with k0 = 0 sends its partial sum to the
// next core, which adds its own and passes it on; the core with k1 = K finishes.
//
// | runtime args  [0] core, [1] pieces, [2] and [3] the cores before and after it on the line, then column,
// |               k0, k1 of each piece, in the order of the work
//
// A piece whose sum is sent on without waiting comes first.
#pragma once

#include <cstdint>

namespace moe {

struct Piece {
    uint32_t column;
    uint32_t begin;
    uint32_t end;

    uint32_t tiles() const { return end - begin; }
    bool continues() const { return begin != 0; }  // a partial sum comes from the core before
    bool finishes(uint32_t k_tiles) const { return end == k_tiles; }
};

constexpr uint32_t kArgCore = 0;
constexpr uint32_t kArgPieces = 1;
constexpr uint32_t kArgBefore = 2;
constexpr uint32_t kArgAfter = 3;
constexpr uint32_t kArgFirstPiece = 4;

inline Piece piece_arg(uint32_t i) {
    return {get_arg_val<uint32_t>(kArgFirstPiece + 3 * i), get_arg_val<uint32_t>(kArgFirstPiece + 3 * i + 1),
            get_arg_val<uint32_t>(kArgFirstPiece + 3 * i + 2)};
}

// Whether a partial sum comes to this core.
inline bool any_continues() {
    bool found = false;
    for (uint32_t i = 0; i < get_arg_val<uint32_t>(kArgPieces); i++) {
        found |= piece_arg(i).continues();
    }
    return found;
}

// Columns whose last piece this core has.
inline uint32_t finished_columns(uint32_t k_tiles) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < get_arg_val<uint32_t>(kArgPieces); i++) {
        found += piece_arg(i).finishes(k_tiles) ? 1 : 0;
    }
    return found;
}

}  // namespace moe
