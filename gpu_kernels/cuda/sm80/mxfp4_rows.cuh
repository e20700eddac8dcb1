// SPDX-License-Identifier: Apache-2.0
// The rows of MXFP4 weights that a warp multiplies, and the rows of a tile: where they lie in memory and in
// shared memory.
//
// A warp makes PRODUCTS times 16 weight rows, low and high ones. Row g of eight low, or of eight high, rows
// of product m is channel channel_of(g) + 2m of 8 * PRODUCTS. Low and high: gate and up rows of the same
// channels, or two times so many channels of down. So transposed products give a lane 2 * PRODUCTS channels
// in a row.
#pragma once

#include "common/activation.cuh"
#include "common/copies.cuh"
#include "sm80/items.cuh"
#include "sm80/mxfp4.cuh"

#ifndef PRODUCTS
#define PRODUCTS 4
#endif
constexpr int CHANNELS = 8 * PRODUCTS;  // low, or high, rows of a warp

struct Mlp {
    const unsigned char *gate_up_blocks, *gate_up_scales;
    Biases gate_up_biases;
    const unsigned char *down_blocks, *down_scales;
    Biases down_biases;
    const u16* hidden;
    const int* row_tokens;
    u16 *act, *out;
    int H, I, row_step, up_rows;
};

__device__ __forceinline__ constexpr int channel_of(int g) { return g / 2 * 2 * PRODUCTS + g % 2; }

// Rows of weights from `first`, a multiple of a warp's, on, counted over low and high rows.
struct Rows {
    int depth;      // channels of a row
    int step;       // rows from one channel to the next
    int to_high;    // and from low to high rows
    int valid;      // rows from the first on: a multiple of 32
    u64 first_row;  // of all experts

    __device__ __forceinline__ Rows(const Mlp& given, bool is_down, int expert, int first) {
        const int R = is_down ? given.H : 2 * given.I;
        depth = is_down ? given.I : given.H;
        step = is_down ? 1 : given.row_step;
        to_high = is_down ? CHANNELS : given.up_rows;
        valid = R - first;
        const bool halves = !is_down && given.row_step == 1;
        first_row = static_cast<u64>(expert) * R + (halves ? first / 2 : first);
    }
    // Address of 16 bytes `unit` of low row g of product 0.
    __device__ __forceinline__ u64 weights(const Mlp& given, bool is_down, int g, int unit) const {
        const unsigned char* blocks = is_down ? given.down_blocks : given.gate_up_blocks;
        return reinterpret_cast<u64>(blocks + (first_row + channel_of(g) * step) * (depth / 2) + 16 * unit);
    }
    // Address of the scale of group 0 of that row.
    __device__ __forceinline__ const unsigned char* scales(const Mlp& given, bool is_down, int g) const {
        const unsigned char* scales = is_down ? given.down_scales : given.gate_up_scales;
        return scales + (first_row + channel_of(g) * step) * (depth / 32);
    }
    // All scales of up to 64 rows, as ScalesHere has them.
    __device__ __forceinline__ void copy_scales(const Mlp& given, bool is_down, u32 to, int threads) const {
        const int bytes = depth / 32, units = min(valid, 64) * bytes / 16;
        // from the first up row on
        const int later = !is_down && step == 1 ? units / 2 : units;
        const unsigned char* from = (is_down ? given.down_scales : given.gate_up_scales) + first_row * bytes;
        const u64 further = static_cast<u64>(to_high) * bytes - later * 16;
        for (int i = threadIdx.x; i < units; i += threads)
            copy_16(to + i * 16, from + (i < later ? 0 : further) + i * 16);
    }
};

// Those scales where the rows of memory lie one after the other: halves, gate rows before up rows.
struct ScalesHere {
    int first, tile, high,
        groups;  // bytes to low row lane / 4 of product 0, to the next product, to high rows

    __device__ __forceinline__ ScalesHere(const Mlp& given, bool is_down) {
        const int step = is_down ? 1 : given.row_step;
        groups = (is_down ? given.I : given.H) / 32;
        first = channel_of(threadIdx.x % 32 / 4) * step * groups;
        tile = 2 * step * groups;
        high = (step == 2 ? 1 : 32) * groups;
    }
};

// Of 16 bytes, unit = 0 .. 15, of 128 channels of a row of a tile: word i of lane t is unit 4t + i. Two rows
// of four lanes touch every bank once.
__device__ __forceinline__ u32 place_of_row(int row, int unit) {
    return row * 256 + ((unit % 4 * 4 + unit / 4) ^ row % 2 * 4) * 16;
}

template <int G>
using Sums = float[PRODUCTS][G][4];

template <int G>
__device__ __forceinline__ void clear(Sums<G>& sums) {
#pragma unroll
    for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
        for (int j = 0; j < G; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][j][i] = 0.0f;
}
