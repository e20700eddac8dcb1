// SPDX-License-Identifier: Apache-2.0
// Products of an item of few rows by warps (mma.sync): no warp waits for another's product.
#pragma once

#include "sm80/mma.cuh"
#include "sm90/mxfp4_place.cuh"

// As `multiply`, by products of a warp: the fewest groups of eight rows that hold the item's.
template <int G, bool LARGE>
__device__ __forceinline__ void multiply_unit(Sums& sums, u32 weights, u32 rows,
                                              const u32 (&scales)[PARTS][2], const Place& place) {
    const int lane = threadIdx.x % 32;
    uint4 words[PARTS][2];
    u32 factors[PARTS][2];
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            words[part][i] = load_16(weights + part * place.part + i * place.second);
            factors[part][i] = LARGE ? factor(scales[part][i]) : small_factor(scales[part][i]);
        }
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
                const uint4& w = words[part][r];
                spread(i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w, four);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    u32 value = multiply_pairs(four[j], factors[part][r]);
                    if (LARGE) value = multiply_pairs(value, rest_of(scales[part][r]));
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
    const ScalesOf of{place, shared.scales + turns.scales.at * SCALE_BYTES, depth / 32};
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int i = 0; i < 4 * G; ++i) sums[part][i] = 0.0f;
    barrier_wait(shared.scales_full + 8 * turns.scales.at, turns.scales.parity);
#pragma unroll 1
    for (int first = 0; first < units; first += 2) {
        u32 scales[2][PARTS][2], any = 0;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    scales[h][part][i] = of(part, i, first + h);
                    any |= scales[h][part][i];
                }
        const bool large = __ballot_sync(~0u, any & 128) != 0;
        barrier_wait(shared.weights_full + 8 * turns.weights.at, turns.weights.parity);
        const u32 weights = shared.weights + turns.weights.at * WEIGHT_BYTES + place.weights;
        const u32 rows = shared.rows + turns.weights.at * ROW_BYTES;
        if (large) {
            multiply_unit<G, true>(sums, weights, rows, scales[0], place);
            if (first + 1 < units)
                multiply_unit<G, true>(sums, weights ^ 64, rows + 2 * HALF_BYTES, scales[1], place);
        } else {
            multiply_unit<G, false>(sums, weights, rows, scales[0], place);
            if (first + 1 < units)
                multiply_unit<G, false>(sums, weights ^ 64, rows + 2 * HALF_BYTES, scales[1], place);
        }
        __syncwarp();
        release(shared.weights_empty + 8 * turns.weights.at);
        turns.weights.next();
    }
    release(shared.scales_empty + 8 * turns.scales.at);
    turns.scales.next();
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
