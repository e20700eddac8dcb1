// SPDX-License-Identifier: Apache-2.0
// Sizes and shared memory of a block of mxfp4_mlp.
#pragma once

#include "sm90/items.cuh"
#include "sm90/mxfp4.cuh"
#include "sm90/rows_out.cuh"

#ifndef WEIGHT_ROWS
#define WEIGHT_ROWS 256
#endif
#ifndef MAX_N
#define MAX_N 128
#endif
#ifndef GROUPS
#define GROUPS 2
#endif
#ifndef BLOCKS
#define BLOCKS 1  // resident, a multiprocessor
#endif
#ifndef WEIGHT_STAGES
#define WEIGHT_STAGES 2
#endif
#ifndef ROW_STAGES
#define ROW_STAGES 2
#endif
#ifndef ROW_UNITS
#define ROW_UNITS 1
#endif
#ifndef SCALE_BYTES
#define SCALE_BYTES 11520  // of the scales of an item; BOXED: none, since stages of weights hold scales
#endif
#ifndef READ_ONCE
#define READ_ONCE 0
#endif
#ifndef INTERLEAVED
#define INTERLEAVED 0
#endif
#ifndef WARP_PRODUCTS
#define WARP_PRODUCTS 0
#endif
#ifndef BY_COLUMNS
#define BY_COLUMNS 0
#endif
#define ONE_RING (WARP_PRODUCTS || BY_COLUMNS)  // a stage has weights and rows
#ifndef DIRECT
#define DIRECT WARP_PRODUCTS
#endif
static_assert(MAX_N % (ONE_RING ? 8 : 16) == 0 && MAX_N <= 192, "rows of a tile");
static_assert(WEIGHT_ROWS == 128 || WEIGHT_ROWS == 256 || (BY_COLUMNS && WEIGHT_ROWS == 512),
              "rows of weights of an item");
static_assert(ROW_UNITS == 1 || ROW_UNITS == 2, "units of a stage of rows");
static_assert(WEIGHT_ROWS % (64 * GROUPS) == 0, "64 rows each");

constexpr int PARTS = WEIGHT_ROWS / 64 / GROUPS;  // products of 64 weight rows a warpgroup
constexpr int BOXES = WEIGHT_ROWS / 128, BOX_BYTES = 128 * 128;
constexpr int BOX_SCALES = BOXED ? 128 * STAGE_GROUPS : 0;      // of a box, in a stage
constexpr int WEIGHT_BYTES = BOXES * (BOX_BYTES + BOX_SCALES);  // of a stage of weights
constexpr int HALF_BYTES = MAX_N * 128;                         // rows of 64 channels
constexpr int ROW_BYTES = 2 * ROW_UNITS * HALF_BYTES;           // of a stage of rows
constexpr int RANGE = WEIGHT_ROWS / 8;                          // gate rows of an item in each 32
constexpr int GATHER_WARPS = 3;
constexpr int CONSUMERS = 4 * GROUPS;                 // warps
constexpr int WRITERS = DIRECT ? CONSUMERS : GROUPS;  // that count a tile's activations, an item
constexpr int PRODUCER_REGISTERS = BLOCKS == 4   ? 40
                                   : BLOCKS == 3 ? 48
                                   : BLOCKS == 2 ? (GROUPS == 1 ? 64 : 48)
                                   : GROUPS == 2 ? 72
                                   : BY_COLUMNS  ? 64
                                                 : 80;
constexpr int CONSUMER_REGISTERS = BLOCKS == 4   ? 88
                                   : BLOCKS == 3 ? 112
                                   : BLOCKS == 2 ? (GROUPS == 1 ? 184 : 96)
                                   : GROUPS == 2 ? 216
                                   : BY_COLUMNS  ? 104
                                                 : 96;

struct Shared {
    u32 weights, rows, scales, pieces, weights_full, weights_empty, rows_full, rows_empty, scales_full,
        scales_empty;
    Items items;

    __device__ __forceinline__ explicit Shared(const void* memory) {
        weights = (shared_address(memory) + 1023) / 1024 * 1024;
        rows = weights + WEIGHT_STAGES * WEIGHT_BYTES;
        pieces = rows + ROW_STAGES * ROW_BYTES;
        scales = pieces + (DIRECT ? 0 : GROUPS * 2 * Piece<PARTS, true>::BYTES);
        weights_full = scales + 2 * SCALE_BYTES;
        weights_empty = weights_full + 8 * WEIGHT_STAGES;
        rows_full = weights_empty + 8 * WEIGHT_STAGES;
#if ONE_RING
        rows_full = weights_full;
        rows_empty = weights_empty;
        scales_full = weights_empty + 8 * WEIGHT_STAGES;
#else
        rows_empty = rows_full + 8 * ROW_STAGES;
        scales_full = rows_empty + 8 * ROW_STAGES;
#endif
        scales_empty = scales_full + 16;
        items = Items(scales_empty + 16);
    }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < WEIGHT_STAGES; ++i) {
            barrier_init(weights_full + 8 * i, ONE_RING ? 1 + 32 * GATHER_WARPS : 1);
            barrier_init(weights_empty + 8 * i, CONSUMERS);
        }
        for (int i = 0; i < (ONE_RING ? 0 : ROW_STAGES); ++i) {
            barrier_init(rows_full + 8 * i, 32 * GATHER_WARPS);
            barrier_init(rows_empty + 8 * i, CONSUMERS);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(scales_full + 8 * i, 1);
            barrier_init(scales_empty + 8 * i, CONSUMERS);
        }
        items.init(GATHER_WARPS + CONSUMERS);
        barrier_init_fence();
    }
};

__device__ __forceinline__ int units_of(int channels) { return (channels + UNIT - 1) / UNIT; }
