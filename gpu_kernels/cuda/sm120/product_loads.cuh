// SPDX-License-Identifier: Apache-2.0
// The shape of mxfp4_product's tiles and stages, and the copies that fill a stage.
#pragma once
#include "common/routing.cuh"
#include "sm120/copies.cuh"
#include "sm120/mx.cuh"

#ifndef TILE_M
#define TILE_M 128
#endif
#ifndef TILE_N
#define TILE_N 128
#endif
#ifndef STAGES
#define STAGES 2
#endif

constexpr bool SWAPPED = TILE_M != 64 && TILE_M != 128, FUSED = TILE_N >= 64;
constexpr int ROWS = SWAPPED ? TILE_N : TILE_M, COLUMNS = SWAPPED ? TILE_M : TILE_N;
constexpr int WARP_ROWS = ROWS * COLUMNS > 8192 ? 32 : 16, WARP_COLUMNS = COLUMNS < 64 ? COLUMNS : 64;
constexpr int WARPS_M = ROWS / WARP_ROWS, WARPS_N = COLUMNS / WARP_COLUMNS, THREADS = 32 * WARPS_M * WARPS_N;
constexpr int MS = WARP_ROWS / 16, NS = WARP_COLUMNS / 8;  // fragments of a warp
constexpr int K_BLOCK = 128, ROW_BYTES = PACKED ? 64 : 128, CHUNKS = ROW_BYTES / 16, STEPS = PACKED ? 2 : 4;
constexpr int WEIGHT_UNIT = PACKED ? 16 : 8;  // bytes of a chunk that are weights
constexpr int WEIGHTS = TILE_M * ROW_BYTES, X_SCALES = WEIGHTS + TILE_N * ROW_BYTES;
constexpr int W_SCALES = X_SCALES + 4 * TILE_M, STAGE_BYTES = W_SCALES + 8 * TILE_N;
constexpr int PASS = THREADS / CHUNKS;  // rows that the threads copy at a time
constexpr int X_PASSES = (TILE_M + PASS - 1) / PASS, W_PASSES = (TILE_N + PASS - 1) / PASS;
constexpr int GROUP_WARPS = 64 / WARP_ROWS;  // SWAPPED: warps that share the scales of their outputs

static_assert(ROWS == 64 || ROWS == 128, "a warp makes 16 or 32 rows");
static_assert(TILE_M <= THREADS && TILE_N <= THREADS, "a thread copies the scales of one row");
static_assert(FUSED || !SWAPPED, "swapped tiles make whole groups of outputs");
static_assert(STAGES >= 2, "one is filled while another is multiplied");

// Swizzled byte offset of a 16-byte chunk of a row: eight rows of one chunk touch every bank once.
__device__ __forceinline__ int place(int row, int chunk) {
    return row * ROW_BYTES + (chunk ^ (CHUNKS == 8 ? row % 8 : row / 2 % 4)) * 16;
}

struct Matrices {
    const u8 *x, *x_scales, *weights, *w_scales;
    const int* row_tokens;
    const Tile* tiles;
    int items, blocks, channels, outputs, row_step, up_step;

    // Weight row of an expert that is row r of a block; -1: none. Where the weights are the columns, a lane
    // has columns 2n and 2n + 1: two outputs, or gate and up of one. Where they are the rows, a lane has rows
    // n and n + 8.
    __device__ __forceinline__ int weight_row(int block, int r) const {
        const int pair = block * (TILE_N / 2) + (SWAPPED ? r / 16 * 8 + r % 8 : r / 2);
        const int second = SWAPPED ? r / 8 % 2 : r % 2;
        if (up_step) return pair < outputs ? pair * row_step + second * up_step : -1;
        return 2 * pair < outputs ? 2 * pair + second : -1;
    }
    __device__ __forceinline__ int weight_rows() const { return up_step ? 2 * outputs : outputs; }
    __device__ __forceinline__ int steps() const { return (channels + K_BLOCK - 1) / K_BLOCK; }
};

// This thread's copies, of one item after the other.
struct Loader {
    const Matrices& given;
    int item, step = 0, steps;
    const u8 *weights, *w_scale, *x_scale;  // the last two: null where this thread copies none
    int x_rows[X_PASSES], w_rows[W_PASSES];

    __device__ __forceinline__ Loader(const Matrices& given) : given(given), item(blockIdx.x) {
        steps = given.steps();
        if (item < given.items) prepare();
    }

    __device__ __forceinline__ void prepare() {
        const Tile tile = given.tiles[item / given.blocks];
        const int block = item % given.blocks, row = threadIdx.x / CHUNKS;
        const u64 first = static_cast<u64>(tile.expert) * given.weight_rows();
        weights = given.weights + first * (given.channels / 2);
#pragma unroll
        for (int i = 0; i < W_PASSES; ++i)
            w_rows[i] = row + PASS * i < TILE_N ? given.weight_row(block, row + PASS * i) : -1;
#pragma unroll
        for (int i = 0; i < X_PASSES; ++i) x_rows[i] = x_row(tile, row + PASS * i);
        const int scaled = threadIdx.x < TILE_N ? given.weight_row(block, threadIdx.x) : -1;
        w_scale = scaled < 0 ? nullptr : given.w_scales + (first + scaled) * (given.channels / GROUP);
        const int token = x_row(tile, threadIdx.x);
        x_scale =
            token < 0 ? nullptr : given.x_scales + static_cast<u64>(token) * scale_stride(given.channels);
    }

    // Row of x that is row r of a tile; -1: none.
    __device__ __forceinline__ int x_row(const Tile& tile, int r) const {
        if (r >= tile.rows) return -1;
        return given.row_tokens ? given.row_tokens[tile.first + r] : tile.first + r;
    }

    // The next 128 channels, to the stage at `to`; what is past the last channel is zero.
    __device__ __forceinline__ void copy(u32 to) {
        if (item < given.items) {
            const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
            const bool here = step * K_BLOCK + chunk * (K_BLOCK / CHUNKS) < given.channels;
            const u32 at = step * (K_BLOCK / 2) + chunk * WEIGHT_UNIT;
#pragma unroll
            for (int i = 0; i < W_PASSES; ++i)
                if (w_rows[i] >= 0)
                    copy_or_zero<WEIGHT_UNIT>(
                        to + WEIGHTS + place(row + PASS * i, chunk),
                        weights + static_cast<u64>(w_rows[i]) * (given.channels / 2) + at,
                        here ? WEIGHT_UNIT : 0);
#pragma unroll
            for (int i = 0; i < X_PASSES; ++i)
                if (x_rows[i] >= 0)
                    copy_or_zero<16>(to + place(row + PASS * i, chunk),
                                     given.x +
                                         static_cast<u64>(x_rows[i]) * (given.channels / (PACKED ? 2 : 1)) +
                                         step * ROW_BYTES + chunk * 16,
                                     here ? 16 : 0);
            if (x_scale) copy_or_zero<4>(to + X_SCALES + 4 * threadIdx.x, x_scale + 4 * step, 4);
            if (w_scale) {
                const u8* from = w_scale + 4 * step;
                const int before = reinterpret_cast<u64>(from) % 4;
                const int bytes = before + min(given.channels / GROUP - 4 * step, 4);
                copy_or_zero<4>(to + W_SCALES + 8 * threadIdx.x, from - before, min(bytes, 4));
                if (before)
                    copy_or_zero<4>(to + W_SCALES + 8 * threadIdx.x + 4, from - before + 4,
                                    max(bytes - 4, 0));
            }
            if (++step == steps) {
                step = 0;
                item += gridDim.x;
                if (item < given.items) prepare();
            }
        }
        copies_commit();
    }
};
