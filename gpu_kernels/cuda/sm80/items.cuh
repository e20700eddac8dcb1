// SPDX-License-Identifier: Apache-2.0
// Work of a grouped product whose blocks claim it: tiles of sorted rows times blocks of weight rows. All
// gate_up items come first, then all down items. Only resident blocks claim. A down item starts when the
// activations of its tile are complete.
#pragma once

#include "common/flags.cuh"
#include "common/routing.cuh"

enum Kind { GATE_UP, DOWN, NONE };

struct alignas(16) Item {
    struct OfTile {
        int expert, first, rows, done;
    } of;
    int tile;         // index of the tile
    int kind, block;  // which weight rows of the expert
    int ready;        // a down item's activations were complete when it was claimed
};

struct Work {
    Tile* tiles;
    int* taken;
    int count, gate_up_items, gate_up_blocks, down_blocks;

    // weight_rows: of an item.
    __device__ __forceinline__ Work(Tile* tiles, int* num_tiles, int H, int I, int weight_rows)
        : tiles(tiles), taken(num_tiles + 1) {
        gate_up_blocks = (2 * I + weight_rows - 1) / weight_rows;
        down_blocks = (H + weight_rows - 1) / weight_rows;
        gate_up_items = *num_tiles * gate_up_blocks;
        count = gate_up_items + *num_tiles * down_blocks;
    }
    __device__ __forceinline__ int claim() const { return atomicAdd(taken, 1); }
    // All of an item but what its tile says.
    __device__ __forceinline__ void place(Item& item, int i) const {
        item.kind = i < gate_up_items ? GATE_UP : i < count ? DOWN : NONE;
        const int at = item.kind == DOWN ? i - gate_up_items : i;
        const int blocks = item.kind == DOWN ? down_blocks : gate_up_blocks;
        item.tile = at / blocks;
        item.block = at % blocks;
    }
    __device__ __forceinline__ Item::OfTile look_up(const Item& item) const {
        if (item.kind == NONE) return {};
        const int4 words = *reinterpret_cast<const int4*>(tiles + item.tile);
        return {words.x, words.y, words.z, words.w};
    }
    __device__ __forceinline__ void fill(Item& item, int i) const {
        place(item, i);
        item.of = look_up(item);
        item.ready = item.kind == DOWN && complete(item.tile);
    }
    __device__ __forceinline__ bool complete(int tile) const {
        return load_acquire(&tiles[tile].done) >= gate_up_blocks;
    }
    // By all threads, behind a barrier: a block's activations of a tile are written.
    __device__ __forceinline__ void made(int tile) const {
        if (threadIdx.x == 0) add_release(&tiles[tile].done, 1);
    }
    // A warp waits until the activations of a down item are complete.
    __device__ __forceinline__ void wait_for_activations(const Item& item) const {
        if (item.kind != DOWN || item.ready) return;
        if (threadIdx.x % 32 == 0)
            while (!complete(item.tile)) {
            }
        __syncwarp();
    }
    // The block's first item, in its slot, and in thread 0 the number of the second.
    __device__ __forceinline__ void claim_first(Item* items, int& second) const {
        if (threadIdx.x == 0) {
            place(items[0], claim());
            items[0].of = look_up(items[0]);
            items[0].ready = 0;
            second = claim();
        }
        __syncthreads();
    }
};
