// SPDX-License-Identifier: Apache-2.0
// What mxfp4_product makes of its sums: biases, SwiGLU, rows in bf16, fp32, or quantised with their scales.
#pragma once
#include "sm120/product_fragments.cuh"

#ifndef CLAMPED
#define CLAMPED 0
#endif

struct Bias {
    const u16* bf16;
    const float* fp32;
    __device__ __forceinline__ float of(u64 row) const {
        return bf16 ? __uint_as_float(static_cast<u32>(bf16[row]) << 16) : fp32 ? fp32[row] : 0.0f;
    }
};

__device__ __forceinline__ float activation(float gate, float up) {
#if CLAMPED
    gate = gate > 7.0f ? 7.0f : gate;  // NaN stays
    up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
    return silu_mul(1.702f * gate, (up + 1.0f) * (1.0f / 1.702f));
#else
    return silu_mul(gate, up);
#endif
}

// A lane has two numbers of each (m, n) and half: two outputs of a token, or gate and up of one.
struct Places {
    const Fragments& of;
    const Matrices& given;
    Tile tile;
    int block;

    __device__ __forceinline__ int token(int m, int n, int half) const {
        const int lane = of.lanes;
        return SWAPPED ? of.column + n * 8 + lane % 4 * 2 + half : of.row + m * 16 + lane / 4 + half * 8;
    }
    // The first of two outputs; of gate_up twice the output.
    __device__ __forceinline__ int output(int m, int n) const {
        const int lane = of.lanes;
        return block * TILE_N + (SWAPPED ? of.row + m * 16 + lane / 4 * 2 : of.column + n * 8 + lane % 4 * 2);
    }
    static __device__ __forceinline__ float first(const float (&sums)[4], int half) {
        return sums[SWAPPED ? half : 2 * half];
    }
    static __device__ __forceinline__ float second(const float (&sums)[4], int half) {
        return sums[SWAPPED ? half + 2 : 2 * half + 1];
    }
};

__device__ __forceinline__ void write_down(const Places& at, const Sums& sums, const Bias& bias, u16* out) {
    const int outputs = at.given.outputs;
#pragma unroll
    for (int m = 0; m < MS; ++m)
#pragma unroll
        for (int n = 0; n < NS; ++n) {
            const int output = at.output(m, n);
            if (output >= outputs) continue;
            const u64 row = static_cast<u64>(at.tile.expert) * outputs + output;
            const float low = bias.of(row), high = bias.of(row + 1);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int token = at.token(m, n, half);
                if (token >= at.tile.rows) continue;
                u16* to = out + static_cast<u64>(at.tile.first + token) * outputs + output;
                *reinterpret_cast<u32*>(to) =
                    pack(at.first(sums[m][n], half) + low, at.second(sums[m][n], half) + high);
            }
        }
}

// Activations in place of the first of each two sums.
__device__ __forceinline__ void activate(const Places& at, Sums& sums, const Bias& bias) {
    const Matrices& given = at.given;
#pragma unroll
    for (int m = 0; m < MS; ++m)
#pragma unroll
        for (int n = 0; n < NS; ++n) {
            const int output = at.output(m, n) / 2;
            const u64 row = static_cast<u64>(at.tile.expert) * given.weight_rows() +
                            min(output, given.outputs - 1) * given.row_step;
            const float gate = bias.of(row), up = bias.of(row + given.up_step);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                sums[m][n][SWAPPED ? half : 2 * half] =
                    activation(at.first(sums[m][n], half) + gate, at.second(sums[m][n], half) + up);
        }
}

__device__ __forceinline__ void write_unrounded(const Places& at, const Sums& sums, float* out) {
#pragma unroll
    for (int m = 0; m < MS; ++m)
#pragma unroll
        for (int n = 0; n < NS; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int output = at.output(m, n) / 2, token = at.token(m, n, half);
                if (output < at.given.outputs && token < at.tile.rows)
                    out[static_cast<u64>(at.tile.first + token) * at.given.outputs + output] =
                        at.first(sums[m][n], half);
            }
}

// Quantised, with the scales of each 32 outputs. maxima: [WARPS_M, COLUMNS] words of shared memory.
__device__ __forceinline__ void write_quantised(const Places& at, const Sums& sums, u8* out, u8* out_scales,
                                                u32* maxima) {
    constexpr int LINES = SWAPPED ? NS : MS;  // fragments of other tokens
    const int lane = at.of.lanes, outputs = at.given.outputs, stride = scale_stride(outputs);
    u32 most[LINES][2] = {};
#pragma unroll
    for (int m = 0; m < MS; ++m)
#pragma unroll
        for (int n = 0; n < NS; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32& line = most[SWAPPED ? n : m][half];
                line = max(line, magnitude(at.first(sums[m][n], half)));
            }
#pragma unroll
    for (int i = 0; i < LINES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32& line = most[i][half];
            if constexpr (SWAPPED) {
                for (int step = 4; step < 32; step *= 2) line = max(line, __shfl_xor_sync(~0u, line, step));
            } else {
                for (int step = 1; step < 4; step *= 2) line = max(line, __shfl_xor_sync(~0u, line, step));
            }
        }
    if constexpr (SWAPPED) {  // a group of outputs is that of several warps
        const int warp = at.of.row / WARP_ROWS, group = warp / GROUP_WARPS * GROUP_WARPS;
        __syncthreads();  // all have read those of the item before
#pragma unroll
        for (int n = 0; n < NS; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (lane < 4) maxima[warp * COLUMNS + at.token(0, n, half)] = most[n][half];
        __syncthreads();
#pragma unroll
        for (int n = 0; n < NS; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                for (int i = 0; i < GROUP_WARPS; ++i)
                    most[n][half] = max(most[n][half], maxima[(group + i) * COLUMNS + at.token(0, n, half)]);
    }
    // whoever has the first output of a group writes its scale
    const int group = at.output(0, 0) / (2 * GROUP);
    const bool writes = SWAPPED ? lane < 4 && at.of.row % 64 == 0 : lane % 4 == 0;
#pragma unroll
    for (int i = 0; i < LINES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = at.token(i, i, half);
            if (group * GROUP >= outputs) continue;
            const bool here = token < at.tile.rows;
            const u64 row = at.tile.first + token;
            const u32 scale = scale_of(most[i][half]);
            const float inverse = inverse_of(scale);
            if (here && writes) {
                u8* to = out_scales + row * stride;
                to[group] = scale;
                if (group == outputs / GROUP - 1)
                    for (int n = group + 1; n < stride; ++n) to[n] = 0;
            }
#pragma unroll
            for (int j = 0; j < (SWAPPED ? MS : NS); ++j) {
                const int m = SWAPPED ? j : i, n = SWAPPED ? i : j;
                const float value = scale == NAN_SCALE ? 0.0f : at.first(sums[m][n], half) * inverse;
                const int output = at.output(m, n) / 2;
#if PACKED
                // of the next output: of the next lane, or of the next row of lanes
                const u32 code = to_e2m1(value), next = __shfl_xor_sync(~0u, code, SWAPPED ? 4 : 1);
                if (here && output % 2 == 0) out[(row * outputs + output) / 2] = code | next << 4;
#else
                if (here) out[row * outputs + output] = pack_e4m3(value, 0.0f);
#endif
            }
        }
}
