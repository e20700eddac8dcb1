// SPDX-License-Identifier: Apache-2.0
// Products of an item of few rows by warpgroups (wgmma), arranged weights: each number of columns N has a
// loop of its own. Weights become fragments in registers, rows lie in shared memory; both share a stage.
#pragma once

#include "sm90/mxfp4_chunks.cuh"
#include "sm90/sparse.cuh"

// A part of a unit, eight steps of 16 channels: words 0 and 2 are of the first row.
struct Fragments {
    u32 words[8][4];

    __device__ __forceinline__ void make(const Chunks& chunks, int part, const u32 (&factors)[2]) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                u32 four[4];
                spread_word(chunks.words[part][row], i, four);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    words[2 * i + j / 2][j % 2 * 2 + row] = multiply_pairs(four[j], factors[row]);
            }
    }
    // What large scales are beyond their factors.
    __device__ __forceinline__ void enlarge(u32 low, u32 high) {
        const u32 rests[2] = {rest_of(low), rest_of(high)};
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) words[i][j] = multiply_pairs(words[i][j], rests[j % 2]);
    }
};

// A unit of a stage. rows: of the unit. Products of a part run while other warpgroups make fragments. ptxas
// makes products in turns if some run across a branch.
template <int N>
__device__ __forceinline__ void multiply_unit(Sums& sums, const Chunks& chunks, u64 rows) {
    const bool large = __any_sync(~0u, (chunks.any() & 128) != 0);
    u32 factors[PARTS][2], scales[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const u32 low = chunks.scales[part][0], high = chunks.scales[part][1];
        factors[part][0] = factor(low);
        factors[part][1] = factor(high);
        scales[part] = low | high << 8;  // one register for what is seldom needed
    }
    Fragments fragments;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        fragments.make(chunks, part, factors[part]);
        if (large) fragments.enlarge(scales[part] & 255, scales[part] >> 8);
        products_begin();
#pragma unroll
        for (int step = 0; step < 8; ++step)
            product_of_registers<N>(sums[part], fragments.words[step],
                                    further(rows, step / 4 * (HALF_BYTES / 16) + step % 4 * OPERAND_STEP),
                                    true);
        products_commit();
        products_wait<0>();  // then the fragments are free
    }
}

template <int N>
__device__ __forceinline__ void multiply_columns(const Shared& shared, Turns& turns, Sums& sums,
                                                 const Item& item, int depth, int I, int H) {
    Place place(item, I);
    place.weights = later(place.weights);
    place.scales = later(place.scales);
    const int units = units_of(depth);
    const bool whole = place.whole();
    // a vote, so that ptxas keeps descriptors in uniform registers
    const bool idle = __all_sync(~0u, Place::idle(item, I, H));
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) sums[part][i] = 0.0f;
#pragma unroll 1
    for (int first = 0; first < units; first += 2) {
        const u32 stage = shared.weights + turns.weights.at * WEIGHT_BYTES;
        const u64 rows = operand(shared.rows + turns.weights.at * ROW_BYTES);
        const int groups = min(STAGE_GROUPS, depth / 32 - 4 * first);
        barrier_wait(shared.weights_full + 8 * turns.weights.at, turns.weights.parity);
        fence_async_proxy();  // rows were written through the generic proxy
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (idle || (h > 0 && first + h >= units)) break;
            Chunks chunks;
            if (whole && groups == STAGE_GROUPS) {
                chunks.load_scales(stage + place.scales + 64 * h);
                chunks.load_words(stage + place.weights + 1024 * h, place);
            } else {
                chunks.load_cut(stage, place, groups, h);
            }
            multiply_unit<N>(sums, chunks, further(rows, h * 2 * HALF_BYTES / 16));
        }
        __syncwarp();
        release(shared.weights_empty + 8 * turns.weights.at);  // products needed its words and rows
        turns.weights.next();
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) sum_here(sums[part][i]);
}

// The smallest N, a multiple of 8, that holds the rows.
template <int N>
__device__ __forceinline__ void multiply_rows(const Shared& shared, Turns& turns, Sums& sums,
                                              const Item& item, int depth, int I, int H) {
    if constexpr (N < MAX_N) {
        if (item.rows > N) {
            multiply_rows<N + 8>(shared, turns, sums, item, depth, I, H);
            return;
        }
    }
    multiply_columns<N>(shared, turns, sums, item, depth, I, H);
}
