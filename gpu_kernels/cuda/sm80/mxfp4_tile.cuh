// SPDX-License-Identifier: Apache-2.0
// A warp's products of 64 rows of MXFP4 weights and few rows of a tile, and the sums of warps that share the
// channels.
#pragma once

#include "sm80/mxfp4_rows.cuh"

constexpr int SUMS_STRIDE = 68;  // from the 64 sums of a row of a tile to those of the next

template <int G, bool LARGE>
__device__ __forceinline__ void multiply_rows(Sums<G>& sums, const uint4* weights, const u32 (&scales)[4][2],
                                              const uint4 (&b)[4][G]) {
    uint4 words[4][2];
    Factor by[4][2];
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            words[m][h] = weights[m * 64 + h * 32];
            by[m][h] = Factor::of<LARGE>(scales[m][h]);
        }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int m = 0; m < 4; ++m)
            multiply_word<LARGE, G>(sums[m], word_of(words[m][0], i), word_of(words[m][1], i), by[m][0],
                                    by[m][1], b[i]);
}

// weights: 64 rows of 64 bytes, low and high rows of each product; rows: of x, N of them; c: the chunk.
template <int G, int N, bool LARGE>
__device__ __forceinline__ void multiply_chunk(Sums<G>& sums, const unsigned char* weights,
                                               const unsigned char* rows, const unsigned char* scales,
                                               const ScalesHere& of_scales, int c) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    uint4 b[4][G];
#pragma unroll
    for (int j = 0; j < G; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            b[i][j] = pairs_of(
                *reinterpret_cast<const uint4*>(rows + j * 2048 + place_of_row(lane / 4 % N, 4 * t + i)));
    const unsigned char* own = scales + of_scales.first + min(4 * c + t, of_scales.groups - 1);
    u32 s[4][2];
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) s[m][h] = own[m * of_scales.tile + h * of_scales.high];
    multiply_rows<G, LARGE>(sums, reinterpret_cast<const uint4*>(weights) + lane, s, b);
}

// A warp's sums of the first `rows` rows of a tile, 64 each, into shared memory.
template <int G, int N>
__device__ __forceinline__ void keep(const Sums<G>& sums, float* memory, int rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < G; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int n = 8 * j + lane % 4 * 2 + i % 2;
            if (n < rows)
#pragma unroll
                for (int m = 0; m < 4; ++m)
                    memory[n * SUMS_STRIDE + i / 2 * 32 + channel_of(lane / 4) + 2 * m] = sums[m][j][i];
        }
}

// Four neighbours of W warps' sums.
template <int W, int N>
__device__ __forceinline__ float4 add_up(const float* memory, int at) {
    float4 sum = *reinterpret_cast<const float4*>(memory + at);
#pragma unroll
    for (int w = 1; w < W; ++w) {
        const float4 more = *reinterpret_cast<const float4*>(memory + w * (N * SUMS_STRIDE) + at);
        sum.x += more.x;
        sum.y += more.y;
        sum.z += more.z;
        sum.w += more.w;
    }
    return sum;
}

// All threads: what `keep` of all warps kept, to act or out.
template <int W, int N>
__device__ __forceinline__ void write_kept(const float* memory, const Item& item, const Mlp& given) {
    const bool is_down = item.kind == DOWN;
    const int quads = is_down ? 16 : 8, q = threadIdx.x % quads;
    const int width = is_down ? given.H : given.I, channel = item.block * quads * 4 + 4 * q;
    if (channel >= width) return;
    float bias[2][4];
    if (BIASED)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u64 row = static_cast<u64>(item.of.expert) * (is_down ? given.H : 2 * given.I) +
                            (channel + i) * (is_down ? 1 : given.row_step);
            bias[0][i] = is_down ? given.down_biases[row] : given.gate_up_biases[row];
            bias[1][i] = is_down ? 0.0f : given.gate_up_biases[row + given.up_rows];
        }
    for (int n = threadIdx.x / quads; n < item.of.rows; n += 32 * W / quads) {
        const int at = n * SUMS_STRIDE + 4 * q;
        float4 low = add_up<W, N>(memory, at);
        if (BIASED) {
            low.x += bias[0][0];
            low.y += bias[0][1];
            low.z += bias[0][2];
            low.w += bias[0][3];
        }
        if (!is_down) {
            float4 high = add_up<W, N>(memory, at + 32);
            if (BIASED) {
                high.x += bias[1][0];
                high.y += bias[1][1];
                high.z += bias[1][2];
                high.w += bias[1][3];
            }
            low.x = activated(low.x, high.x);
            low.y = activated(low.y, high.y);
            low.z = activated(low.z, high.z);
            low.w = activated(low.w, high.w);
        }
        u16* to = (is_down ? given.out : given.act) + static_cast<u64>(item.of.first + n) * width + channel;
        *reinterpret_cast<uint2*>(to) = make_uint2(pack(low.x, low.y), pack(low.z, low.w));
    }
}
