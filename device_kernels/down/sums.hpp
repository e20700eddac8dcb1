// SPDX-License-Identifier: Apache-2.0
// The sums of the tokens, kept on the core where a column ends: for each such column a tile for every 32
// tokens. The reader takes the sums of a block's tokens out, the writer puts them back with the block added.
#pragma once

#include <cstdint>

#include "common/schedule.hpp"

namespace moe {

constexpr uint32_t kSumBytes = get_named_compile_time_arg_val("sum_tile_bytes");
constexpr uint32_t cb_ids = get_named_compile_time_arg_val("cb_ids");
constexpr uint32_t cb_sum = get_named_compile_time_arg_val("cb_sum");
constexpr uint32_t cb_old = get_named_compile_time_arg_val("cb_old");
constexpr uint32_t kAdded = get_named_compile_time_arg_val("sem_added");  // blocks that are in the sums

constexpr uint32_t kFaceBytes = kSumBytes / 4;
constexpr uint32_t kFaceRowBytes = kFaceBytes / 16;

// Where the left half of a tile's row starts; the right half is a face further on.
inline uint32_t row_offset(uint32_t row) { return (row / 16) * 2 * kFaceBytes + (row % 16) * kFaceRowBytes; }

// The same of a token, in the sums of a column.
inline uint32_t token_offset(uint32_t token) {
    return token / kBlockRows * kSumBytes + row_offset(token % kBlockRows);
}

}  // namespace moe
