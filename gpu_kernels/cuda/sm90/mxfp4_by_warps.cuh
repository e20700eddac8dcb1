// SPDX-License-Identifier: Apache-2.0
// Products of an item of few rows by warps (mma.sync): no warp waits for another's product.
#pragma once

#include "sm80/mma.cuh"
#include "sm90/mxfp4_chunks.cuh"

// As `multiply`, by products of a warp: the fewest groups of eight rows that hold the item's.
template <int G, bool LARGE>
__device__ __forceinline__ void multiply_unit(Sums& sums, const Chunks& chunks, u32 rows) {
    const int lane = threadIdx.x % 32;
    u32 factors[PARTS][2];
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            factors[part][i] = LARGE ? factor(chunks.scales[part][i]) : small_factor(chunks.scales[part][i]);
    // matrices of k 0 .. 7, 8 .. 15 of a step, then of the next step: chunks 4 i % 8 .. of a row
    const u32 row = rows + lane % 8 * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 a[PARTS][2][4];
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                u32 four[4];
                spread_word(chunks.words[part][r], i, four);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    u32 value = multiply_pairs(four[j], factors[part][r]);
                    if (LARGE) value = multiply_pairs(value, rest_of(chunks.scales[part][r]));
                    a[part][j / 2][j % 2 * 2 + r] = value;
                }
            }
        const u32 chunk = (i % 2 * 4 + lane / 8) ^ (lane % 8);
#pragma unroll
        for (int g = 0; g < G; ++g) {
            u32 b[4];
            load_matrices(b, row + i / 2 * HALF_BYTES + g * 1024 + chunk * 16);
#pragma unroll
            for (int step = 0; step < 2; ++step)
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    float (&sum)[4] = reinterpret_cast<float (&)[4]>(sums[part][4 * g]);
                    multiply_add(sum, a[part][step], b[2 * step], b[2 * step + 1]);
                }
        }
    }
}

template <int G>
__device__ __forceinline__ void multiply_by_warps(const Shared& shared, Turns& turns, Sums& sums,
                                                  const Item& item, int depth, int I) {
    const Place place(item, I);
    const int units = units_of(depth);
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int i = 0; i < 4 * G; ++i) sums[part][i] = 0.0f;
#if !BOXED
    const ScalesOf of{place, shared.scales + turns.scales.at * SCALE_BYTES, depth / 32};
    barrier_wait(shared.scales_full + 8 * turns.scales.at, turns.scales.parity);
#endif
#pragma unroll 1
    for (int first = 0; first < units; first += 2) {
        const u32 rows = shared.rows + turns.weights.at * ROW_BYTES;
        const u32 stage = shared.weights + turns.weights.at * WEIGHT_BYTES;
        Chunks chunks[2];
        const u32 weights = stage + place.weights;
#if BOXED
        const int groups = min(STAGE_GROUPS, depth / 32 - 4 * first);
        const bool cut = !place.whole() || groups < STAGE_GROUPS;
        barrier_wait(shared.weights_full + 8 * turns.weights.at, turns.weights.parity);
#pragma unroll
        for (int h = 0; h < 2; ++h) chunks[h].load_scales(stage + place.scales + 64 * h);
#else
#pragma unroll
        for (int h = 0; h < 2; ++h) chunks[h].load_scales(of, first + h);
#endif
        const bool large = __ballot_sync(~0u, (chunks[0].any() | chunks[1].any()) & 128) != 0;
#if BOXED
        if (large || cut) {
#pragma unroll 1
            for (int h = 0; h < 2 && first + h < units; ++h) {
                chunks[0].load_cut(stage, place, groups, h);
                multiply_unit<G, true>(sums, chunks[0], rows + 2 * HALF_BYTES * h);
            }
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                chunks[h].load_words(weights + 1024 * h, place);
                multiply_unit<G, false>(sums, chunks[h], rows + 2 * HALF_BYTES * h);
            }
        }
#else
        barrier_wait(shared.weights_full + 8 * turns.weights.at, turns.weights.parity);
        if (large) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (h == 0 || first + 1 < units) {
                    chunks[h].load_words(weights ^ 64 * h, place);
                    multiply_unit<G, true>(sums, chunks[h], rows + 2 * HALF_BYTES * h);
                }
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (h == 0 || first + 1 < units) {
                    chunks[h].load_words(weights ^ 64 * h, place);
                    multiply_unit<G, false>(sums, chunks[h], rows + 2 * HALF_BYTES * h);
                }
        }
#endif
        __syncwarp();
        release(shared.weights_empty + 8 * turns.weights.at);
        turns.weights.next();
    }
#if !BOXED
    release(shared.scales_empty + 8 * turns.scales.at);
    turns.scales.next();
#endif
}

template <int G>
__device__ __forceinline__ void multiply_rows(const Shared& shared, Turns& turns, Sums& sums,
                                              const Item& item, int depth, int I) {
    if constexpr (8 * G < MAX_N) {
        if (item.rows > 8 * G) {
            multiply_rows<G + 1>(shared, turns, sums, item, depth, I);
            return;
        }
    }
    multiply_by_warps<G>(shared, turns, sums, item, depth, I);
}
