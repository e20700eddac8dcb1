// SPDX-License-Identifier: Apache-2.0
// Online softmax in the registers of a warpgroup: 64 queries by 128 keys. A thread holds parts of two rows,
// shared with three other threads of its warp, in the layout of wgmma.cuh's sums.
#pragma once

#include "sm90/ptx.cuh"
#include "sm90/wgmma.cuh"

constexpr int SUMS = 64;  // per thread
using Sums = float[SUMS];
using Weights = u32[SUMS / 2];  // two per word: the A operand of a product

#define MINUS_INFINITY __int_as_float(0xff800000)

__device__ __forceinline__ void here(Sums& sums) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sum_here(sums[i]);
}

// Which of the thread's two rows an element belongs to.
__device__ __forceinline__ constexpr int row_of(int i) { return i / 2 % 2; }

__device__ __forceinline__ void scale_rows(Sums& sums, const float (&by)[2]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] *= by[row_of(i)];
}

__device__ __forceinline__ void round_weights(Weights& weights, const Sums& scores) {
#pragma unroll
    for (int i = 0; i < SUMS / 2; ++i) weights[i] = pack(scores[2 * i], scores[2 * i + 1]);
}

// Causal mask: a query does not attend to keys past its position. position: that of the thread's first row;
// the second row is 8 further.
__device__ __forceinline__ void hide(Sums& scores, int first_key, int position) {
    const int key = first_key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < SUMS; ++i)
        if (key + i / 4 * 8 + i % 2 > position + row_of(i) * 8) scores[i] = MINUS_INFINITY;
}

struct Softmax {
    float highest[2] = {MINUS_INFINITY, MINUS_INFINITY}, total[2] = {0, 0};
    float shrink[2];  // factor for the sums so far

    // Turn scores into weights. scale: softmax scale times log2(e).
    __device__ __forceinline__ void add(Sums& scores, float scale) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float most = highest[r];
#pragma unroll
            for (int i = 2 * r; i < SUMS; i += 4) most = fmaxf(most, fmaxf(scores[i], scores[i + 1]));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            const float base = most == MINUS_INFINITY ? 0.0f : most * scale;  // no key seen yet
            shrink[r] = exp2_of(highest[r] * scale - base);
            highest[r] = most;
            float sum = 0;
#pragma unroll
            for (int i = 2 * r; i < SUMS; i += 4) {
                scores[i] = exp2_of(scores[i] * scale - base);
                scores[i + 1] = exp2_of(scores[i + 1] * scale - base);
                sum += scores[i] + scores[i + 1];
            }
            total[r] = total[r] * shrink[r] + sum;
        }
    }
    // Keep `add` before the code that follows. memory: any shared address.
    __device__ __forceinline__ void is_here(Sums& scores, u32 memory) const {
        here(scores);
        before_all_else(total[0] + total[1], memory);
    }
    // Final factor for the sums.
    __device__ __forceinline__ void finish(float (&factors)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float all = total[r];
            all += __shfl_xor_sync(~0u, all, 1);
            all += __shfl_xor_sync(~0u, all, 2);
            factors[r] = 1.0f / all;
        }
    }
};
