// SPDX-License-Identifier: Apache-2.0
// A row of logits as draw_tokens reads it: the weight of a logit as a bin and a deficit, and the order of
// tokens.
#pragma once

#include "common/cluster.cuh"
#include "common/copies.cuh"

#ifndef FP32
#define FP32 0
#endif
#ifndef THREADS
#define THREADS 1024
#endif

constexpr int BINS = 2048;
constexpr int AHEAD = 4;              // reads of a thread at a time
constexpr float STEP = 44.0f / BINS;  // of a bin, in powers of two
constexpr double UNIT = 1 << 20;      // of amounts: the first weight of a bin
constexpr double WHOLE = 1ull << 44;  // of masses: the largest weight

struct Row {
    const uint4* logits;
    int units;                 // of 16 bytes
    float largest, per_logit;  // bins
};

// How many bins a logit is below the largest. Rounded step by step, so that every pass finds the same.
__device__ __forceinline__ float place_of(const Row& row, float value) {
    const float place = __fmul_rn(__fsub_rn(row.largest, value), row.per_logit);
    return place > 0.0f ? place : 0.0f;  // inf - inf, too
}

// What is missing in its bin's first weight, in 1 / UNIT of it. Below 2^14, so that 2^18 of them fit a word.
__device__ __forceinline__ u32 deficit_of(float place) {
    const float over = __fsub_rn(place, static_cast<float>(static_cast<int>(place)));
    const float deficit = __fmul_rn(__fsub_rn(1.0f, exp2f(__fmul_rn(over, -STEP))), static_cast<float>(UNIT));
    return deficit > 0.0f ? static_cast<u32>(deficit + 0.5f) : 0;
}

// Masses of an amount 1 in a bin.
__device__ __forceinline__ double scale_of(int bin) {
    return exp2(static_cast<double>(bin) * -STEP) * (WHOLE / UNIT);
}

// Ascending in the order of draws; no two tokens have the same.
__device__ __forceinline__ u64 key_of(float value, int token) {
    const u32 bits = __float_as_uint(value + 0.0f);  // -0 is 0
    const u32 below = bits >> 31 ? bits : ~(bits | 0x80000000u);
    return static_cast<u64>(below) << 32 | static_cast<u32>(token);
}

__device__ __forceinline__ float value_of(u64 key) {
    const u32 below = key >> 32;
    return __uint_as_float(below >> 31 ? below : ~below & 0x7fffffffu);
}

// do_(value, token) for each logit of this block's part of the row.
template <class Do>
__device__ __forceinline__ void each(const Row& row, Do do_) {
    constexpr int ALL = CLUSTER * THREADS;
    for (int first = rank_in_cluster() * THREADS + threadIdx.x; first < row.units; first += AHEAD * ALL) {
        uint4 read[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k)
            read[k] = load_there(row.logits + min(first + k * ALL, row.units - 1));
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const int unit = first + k * ALL;
            if (unit >= row.units) break;
            const u32 words[4] = {read[k].x, read[k].y, read[k].z, read[k].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (FP32) {
                    do_(__uint_as_float(words[i]), unit * 4 + i);
                } else {
                    do_(first_of(words[i]), unit * 8 + 2 * i);
                    do_(second_of(words[i]), unit * 8 + 2 * i + 1);
                }
            }
        }
    }
}

// do_(key) for each of those in one bin.
template <class Do>
__device__ __forceinline__ void each_of(const Row& row, int bin, Do do_) {
    const float from = bin, to = bin + 1;
    each(row, [&](float value, int token) {
        const float place = place_of(row, value);
        if (place >= from && place < to) do_(place, key_of(value, token));
    });
}
