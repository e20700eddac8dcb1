// SPDX-License-Identifier: Apache-2.0
// Work items of a launch that makes both grouped products, and how a block's warps hear of them. One thread
// of the producer claims items from a counter; READERS warps read each.
#pragma once

#include "common/routing.cuh"
#include "sm90/ptx.cuh"
#include "sm90/ring.cuh"

constexpr int SLOTS = 4;  // items claimed ahead of the one in progress
constexpr int ITEM_BYTES = 32;

enum Kind { GATE_UP, DOWN, NONE };

// As the producer passes it to the other warps, in ITEM_BYTES.
struct Item {
    int expert, first, rows;  // of the tile
    int tile;                 // index of the tile
    int kind, block;          // of rows of weights
};

// All items of gate_up come first, then all of down.
struct Work {
    Tile* tiles;
    int count, gate_up_items, gate_up_blocks, down_blocks, H, I;

    // Blocks: of rows of weights, of one expert.
    __device__ __forceinline__ Work(Tile* tiles, int num_tiles, int gate_up_blocks, int down_blocks, int H,
                                    int I)
        : tiles(tiles), gate_up_blocks(gate_up_blocks), down_blocks(down_blocks), H(H), I(I) {
        gate_up_items = num_tiles * gate_up_blocks;
        count = gate_up_items + num_tiles * down_blocks;
    }
    __device__ __forceinline__ Item item(int i) const {
        Item item{};
        item.kind = i < gate_up_items ? GATE_UP : i < count ? DOWN : NONE;
        if (item.kind == NONE) return item;
        const int at = item.kind == DOWN ? i - gate_up_items : i;
        const int blocks = item.kind == DOWN ? down_blocks : gate_up_blocks;
        item.tile = at / blocks;
        item.block = at % blocks;
        const int4 words = *reinterpret_cast<const int4*>(tiles + item.tile);
        item.expert = words.x;
        item.first = words.y;
        item.rows = words.z;
        return item;
    }
    __device__ __forceinline__ int depth(const Item& item) const { return item.kind == DOWN ? I : H; }
};

// Shared memory of the items: SLOTS items, and two barriers for each, from a multiple of 8 bytes on.
struct Items {
    u32 full, empty, items;

    Items() = default;
    __device__ __forceinline__ explicit Items(u32 at)
        : full(at), empty(full + 8 * SLOTS), items((empty + 8 * SLOTS + 15) / 16 * 16) {}
    __device__ __forceinline__ void init(int readers) const {
        for (int i = 0; i < SLOTS; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, readers);
        }
    }
    __device__ __forceinline__ void tell(Turn<SLOTS>& slot, const Item& item) const {
        const u32 to = items + ITEM_BYTES * slot.at;
        barrier_wait(empty + 8 * slot.at, slot.parity ^ 1);
        store_16(to, make_uint4(item.expert, item.first, item.rows, item.tile));
        store_16(to + 16, make_uint4(item.kind, item.block, 0, 0));
        barrier_arrive(full + 8 * slot.at);
        slot.next();
    }
    __device__ __forceinline__ Item hear(Turn<SLOTS>& slot) const {
        const u32 from = items + ITEM_BYTES * slot.at;
        barrier_wait(full + 8 * slot.at, slot.parity);
        const uint4 tile = load_16(from), what = load_16(from + 16);
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * slot.at);
        slot.next();
        return Item{int(tile.x), int(tile.y), int(tile.z), int(tile.w), int(what.x), int(what.y)};
    }
};

// Wait until a tile counts so many parts of its activations.
__device__ __forceinline__ void wait_for_tile(const Tile* tile, int parts) {
    if (threadIdx.x % 32 == 0)
        while (load_acquire(&tile->done) < parts) {
        }
    __syncwarp();
}
