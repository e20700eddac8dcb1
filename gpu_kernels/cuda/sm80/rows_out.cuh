// SPDX-License-Identifier: Apache-2.0
// Where a warp's sums go: 64 weight rows times G groups of 8 rows of a tile, to act or to out.
#pragma once

#include "sm80/items.cuh"
#include "sm80/mma.cuh"

// Four words of four products, transposed: eight channels in a row of one row of the tile.
__device__ __forceinline__ void store(u16* to, bool valid, u32 a, u32 b, u32 c, u32 d) {
    const uint4 words = make_uint4(transposed(a), transposed(b), transposed(c), transposed(d));
    if (valid) *reinterpret_cast<uint4*>(to) = words;
}

// Two words of two products, transposed: four channels in a row.
__device__ __forceinline__ void store(u16* to, bool valid, u32 a, u32 b) {
    const uint2 words = make_uint2(transposed(a), transposed(b));
    if (valid) *reinterpret_cast<uint2*>(to) = words;
}

// of_64: which 64 rows of weights. first: row of the tile.
template <int G, int GROUPS_OF_SUMS>
__device__ __forceinline__ void write(const float (&sums)[4][GROUPS_OF_SUMS][4], const Item& item, int of_64,
                                      int first, u16* act, u16* out, int H, int I) {
    const int lane = threadIdx.x % 32;
    const bool is_down = item.kind == DOWN;
    const int width = is_down ? H : I;
    const int channel = of_64 * (is_down ? 64 : 32);
    const int row = first + lane / 4, left = item.of.rows - row;
    u16* to = (is_down ? out : act) + static_cast<u64>(item.of.first + row) * width + channel + lane % 4 * 8;
    if (channel >= width) return;
#pragma unroll
    for (int j = 0; j < G; ++j) {
        const bool valid = 8 * j < left;
        u32 words[4];
        if (is_down) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int m = 0; m < 4; ++m) words[m] = pack(sums[m][j][2 * half], sums[m][j][2 * half + 1]);
                store(to + 32 * half, valid, words[0], words[1], words[2], words[3]);
            }
        } else {
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const float* d = sums[m][j];
                words[m] = pack(silu_mul(d[0], d[2]), silu_mul(d[1], d[3]));
            }
            store(to, valid, words[0], words[1], words[2], words[3]);
        }
        to += 8 * static_cast<u64>(width);
    }
}
