// SPDX-License-Identifier: Apache-2.0
// Where the left operand of a product lies while a window of blocks runs: in L1, each tile on one core.
//
// A block's k_tiles tiles are cut into chunks of `chunk` tiles.
//
// | chunk q of block b  unit u = (b - first block of the window) * chunks + q
// | unit u              core u % cores, slot u / cores of one half of that core's home buffer
//
// Windows take the two halves in turn. So DRAM is read once for each tile, however many cores need it.
#pragma once

#include <cstdint>

#include "common/grid.hpp"

namespace moe {

struct Homes {
    uint32_t base;  // of the home buffer, the same on all cores
    uint32_t tile_bytes;
    uint32_t k_tiles;
    uint32_t chunk;
    uint32_t chunks;
    uint32_t slots;   // of one half
    uint32_t window;  // blocks
    uint32_t cores;

    uint32_t slot_address(uint32_t window_index, uint32_t slot) const {
        return base + ((window_index & 1) * slots + slot) * chunk * tile_bytes;
    }
    uint32_t chunk_tiles(uint32_t q) const {
        const uint32_t left = k_tiles - q * chunk;
        return left < chunk ? left : chunk;
    }

    // Start reading tiles [begin, end) of a block into L1 at `to`. The caller waits for the reads.
    void fetch(const Grid& grid, uint32_t block, uint32_t begin, uint32_t end, uint32_t to) const {
        const uint32_t index = block / window;
        const uint32_t first_unit = (block - index * window) * chunks;
        for (uint32_t k = begin; k < end;) {
            const uint32_t q = k / chunk;
            const uint32_t stop = (q + 1) * chunk < end ? (q + 1) * chunk : end;
            const uint32_t unit = first_unit + q;
            const uint32_t from = slot_address(index, unit / cores) + (k - q * chunk) * tile_bytes;
            const uint32_t bytes = (stop - k) * tile_bytes;
            noc_async_read(grid.address(unit % cores, from), to, bytes);
            to += bytes;
            k = stop;
        }
    }
};

}  // namespace moe
