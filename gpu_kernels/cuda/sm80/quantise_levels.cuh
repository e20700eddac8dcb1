// SPDX-License-Identifier: Apache-2.0
// Vectors of 128 channels to levels and a scale, four channels a lane: kv/bucketed/quantise.py, bit by bit.
// Every operation rounds by itself: no product joins a sum.
#pragma once

#include "sm80/hadamard.cuh"
#include "sm80/halves.cuh"

// Over 128 channels: neighbours first.
__device__ __forceinline__ float sum_of_channels(const float (&x)[4]) {
    float sum = __fadd_rn(__fadd_rn(x[0], x[1]), __fadd_rn(x[2], x[3]));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
    return sum;
}

// The largest absolute value; NaN where one is.
__device__ __forceinline__ float most_of_channels(const float (&x)[4]) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
#pragma unroll
    for (int step = 16; step; step /= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
    return __uint_as_float(most);
}

// A scale as fp16 stores it, within fp16's normal numbers.
__device__ __forceinline__ float stored_scale(float scale) {
    return first_of_fp16(pack_fp16(fminf(fmaxf(scale, 6.103515625e-05f), 65504.0f), 0.0f));
}

__device__ __forceinline__ float level_of(float x, float scale, float half) {
    return fminf(fmaxf(rintf(__fadd_rn(__fdiv_rn(x, scale), half)), 0.0f), 2 * half);
}

// Levels as whole numbers; the scale as fp16 stores it. 16 bits: levels are the bits of bf16.
template <int BITS>
__device__ __forceinline__ float quantised(const float (&x)[4], u32 (&levels)[4]) {
    if (BITS == 16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) levels[i] = pack(x[i], 0.0f) & 0xffffu;
        return 1.0f;
    }
    constexpr float HALF = ((1 << BITS) - 1) * 0.5f;
    constexpr double STEP = BITS == 2 ? 0.9957 : BITS == 3 ? 0.5860 : 0.3352;
    constexpr double AROUND[6] = {0.7, 0.8, 0.9, 1.0, 1.1, 1.25};
    const float most = most_of_channels(x);
    float best = stored_scale(__fmul_rn(most, static_cast<float>(1.0 / HALF)));
    float found[4], squares[4];
    if (BITS < 8) {
#pragma unroll
        for (int i = 0; i < 4; ++i) squares[i] = __fmul_rn(x[i], x[i]);
        const float square = sum_of_channels(squares);
        const float rms = __fsqrt_rn(__fmul_rn(square, 0.0078125f));
        float error = 0;
#pragma unroll
        for (int c = 0; c < 7; ++c) {
            const float scale =
                c ? stored_scale(__fmul_rn(rms, static_cast<float>(STEP * AROUND[c ? c - 1 : 0]))) : best;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float left =
                    __fsub_rn(__fmul_rn(__fsub_rn(level_of(x[i], scale, HALF), HALF), scale), x[i]);
                squares[i] = __fmul_rn(left, left);
            }
            const float other = sum_of_channels(squares);
            if (c == 0 || other < error) best = scale, error = other;
        }
        if (!(most < __int_as_float(0x7f800000))) best = __int_as_float(0x7fc00000);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            found[i] = level_of(x[i], best, HALF);
            squares[i] = __fmul_rn(x[i], __fsub_rn(found[i], HALF));
        }
        const float wanted = __fdiv_rn(square, sum_of_channels(squares));
        if (wanted > 0.0f && wanted < 65504.0f) best = stored_scale(wanted);
    } else {
        if (!(most < __int_as_float(0x7f800000))) best = __int_as_float(0x7fc00000);
#pragma unroll
        for (int i = 0; i < 4; ++i) found[i] = level_of(x[i], best, HALF);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) levels[i] = static_cast<u32>(found[i]);
    return best;
}

__device__ __forceinline__ u16 scale_bits(float scale) { return pack_fp16(scale, 0.0f) & 0xffffu; }

// Where a level of 8 or 16 bits lies, in bytes from its unit's first: kv/bucketed/packing.py.
template <int BITS>
__device__ __forceinline__ int byte_of_level(int token, int channel, bool values) {
    const int pair = token / 8 * 16 + channel / 8;
    const int lane = values ? channel % 8 * 4 + token % 8 / 2 : token % 8 * 4 + channel % 8 / 2;
    const int half = (values ? token : channel) % 2;
    const int word = BITS == 8 ? pair / 2 : pair;
    return ((word / 4 * 32 + lane) * 4 + word % 4) * 4 + half * 2 + (BITS == 8 ? pair % 2 : 0);
}
