// SPDX-License-Identifier: Apache-2.0
// Where a consumer thread of mxfp4_mlp finds its weights and scales.
#pragma once

#include "sm90/mxfp4_block.cuh"

using Sums = float[PARTS][MAX_N / 2];  // of PARTS x 64 weight rows and N rows of the tile

#if BOXED
// Where this thread finds the chunks of an item's stages.
struct Place {
    static constexpr u32 second = 512, part = 8192;  // bytes, of whole boxes
    u32 weights, scales;                             // of whole boxes: from the begin of a stage
    int rows;                                        // of a fragment: 16 in whole boxes

    __device__ __forceinline__ Place(const Item& item, int I) {
        const int lane = threadIdx.x % 32;
        weights = box() * BOX_BYTES + fragment() * 2048 + lane * 16;
        scales = BOXES * BOX_BYTES + box() * BOX_SCALES + fragment() * 128 + lane;
        rows = item.kind == DOWN ? 16 : Box::of_gate_up(item.block * BOXES + box(), I).rows;
    }
    // Of part 0. Computed where they are needed: registers are short.
    __device__ __forceinline__ static int box() { return (threadIdx.x / 128 - 1) * PARTS / 2; }
    __device__ __forceinline__ static int fragment() {
        return (threadIdx.x / 128 - 1) * PARTS % 2 * 4 + threadIdx.x % 128 / 32;
    }
    __device__ __forceinline__ bool whole() const { return rows == 16; }
    // No weight row of this warpgroup is one of the matrix.
    __device__ __forceinline__ static bool idle(const Item& item, int I, int H) {
        const int at = item.block * BOXES + box();
        return item.kind == DOWN ? at * 128 + fragment() / 4 * 64 >= H : Box::of_gate_up(at, I).rows == 0;
    }
    __device__ __forceinline__ Chunk chunk(int of_part, int groups, int unit) const {
        return Chunk(fragment() + 4 * of_part, rows, groups, unit);
    }
};
#else
// Where the two rows of this thread's fragments lie in a stage of weights and in the scales.
struct Place {
    u32 weights, second, part;             // bytes
    int scales, second_scale, part_scale;  // rows

    // Fragment rows g and g + 8 of a warp: of down those rows, swapped so that lanes that load together use
    // different banks; of gate_up a gate row and its up row. Eight g are the channels of one 16-byte chunk of
    // act: 32 (g / 2) + 4 (g % 2) + what the warp, the part and the item add.
    __device__ __forceinline__ Place(const Item& item, int I) {
        const int group = threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        const int g = lane / 4, at = group * PARTS, box = at / 2, sub = at % 2;  // of 64 weight rows
        int row;
        if (item.kind == DOWN) {
            row = sub * 64 + warp * 16 + g % 2 * 4 + g / 2;
            second = 8 * 128;
            part = 64 * 128;
            scales = at * 64 + warp * 16 + g;
            second_scale = 8;
            part_scale = 64;
        } else {
            const int within = sub * 8 + g % 2 * 4 + warp;
            row = g / 2 * 16 + within;
            second = 64 * 128;
            part = 8 * 128;
            // rows past the last are 0 and have no scales: those of others serve, none of which is chance
            const bool here = item.block / (2 / BOXES) * UNIT + g / 2 * 32 < I;
            scales = (here ? g / 2 * RANGE : 0) + box * 16 + within;
            second_scale = 4 * RANGE;
            part_scale = 8;
#if INTERLEAVED
            scales *= 2;
            second_scale = 1;
            part_scale *= 2;
#endif
        }
        weights = box * BOX_BYTES + row * 128 + (lane % 4 ^ row % 8) * 16;
    }
};
#endif

// By each warp.
__device__ __forceinline__ void release(u32 barrier) {
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// The same of what the copy engine refills, by each thread that loaded from it. Without the fence an arrival
// overtakes loads before it, and so may the refill: a first replay then multiplied wrong weights.
__device__ __forceinline__ void release_read(u32 barrier) {
    fence_async_proxy();
    __syncwarp();
    release(barrier);
}

struct Turns {
    Turn<WEIGHT_STAGES> weights;
    Turn<ROW_STAGES> rows;
    Turn<2> scales;
};

#if !BOXED
// The scales of an item, as this thread needs them.
struct ScalesOf {
    const Place& place;
    u32 from;
    int pitch;

    __device__ __forceinline__ u32 operator()(int part, int i, int unit) const {
        // past the last channel there are weights of 0, and no scale
        const int group = min(4 * unit + static_cast<int>(threadIdx.x % 4), pitch - 1);
        return load_byte(from + (place.scales + part * place.part_scale + i * place.second_scale) * pitch +
                         group);
    }
};
#endif

// Scales of a unit, of two rows a part, as bytes.
struct UnitScales {
    u32 scales[PARTS][2];

#if BOXED
    // of_scales: of part 0 and the first row.
    __device__ __forceinline__ void load_scales(u32 of_scales) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) scales[part][i] = load_byte(of_scales + part * 512 + i * 32);
    }
#else
    __device__ __forceinline__ void load_scales(const ScalesOf& of, int unit) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) scales[part][i] = of(part, i, unit);
    }
#endif
};
