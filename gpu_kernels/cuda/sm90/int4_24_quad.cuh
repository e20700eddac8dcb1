// SPDX-License-Identifier: Apache-2.0
// Words of int4_24 as A of sparse products with few columns, a chunk of the format a chunk of A: four groups
// of 32 channels at a time, and two tokens a product.
//
// The two indices of a chunk of A may come in any order; they only have to differ. So the kept value takes a
// slot of our choice, with idx2 as its index; the other slot holds 0 and the index 3 - idx2.
//
// Lane t of a quad owns the words of group t: it decodes whole words, so that a warp decodes none twice. Step
// i of four takes two chunks of each word: X in k position t, Y in t + 4.
//
// | step | X | Y |
// |------|---|---|
// | 0    | 0 | 2 |
// | 1    | 1 | 3 |
// | 2    | 4 | 6 |
// | 3    | 5 | 7 |
//
// So a product mixes four groups. B keeps them apart: columns 2g and 2g + 1 hold two tokens' channels of
// group g alone, and zeros in the k of other groups. The sums of lane t are then those of its own words,
// whose scale it has. Lane t gets nibble t of idx2 of four lanes: lanes 0 and 1 give the metadata of steps 0
// and 1, lanes 2 and 3 of steps 2 and 3; even lanes of X, whose value comes first, odd ones of Y, whose value
// comes second.
#pragma once

#include "sm80/int4_24_rows.cuh"
#include "sm90/sparse.cuh"

struct QuadDecoder {
    u32 even, odd;      // factors of the low half, whose values may lie 4 bits higher
    u32 bytes;          // selector of what this pair of lanes needs, of its own and of the other pair's words
    u32 turn, nibbles;  // bits to turn the neighbour's nibbles by; those of its own that this lane keeps

    __device__ __forceinline__ explicit QuadDecoder(u32 zero) {
        const int t = threadIdx.x % 4;
        even = 0x7f00u + zero;  // 2^127
        odd = 0x7d00u + zero;   // 2^123: of what lies 4 bits higher
        bytes = (t < 2 ? 0x6240 : 0x3715) + zero;
        turn = (t % 2 ? 28 : 4) + zero;
        nibbles = (t % 2 ? 0xf0f0f0f0u : 0x0f0f0f0fu) + zero;
    }

    struct Fragment {
        u32 a[4][4], metadata[2];
        float low, high;  // scales
    };

    // X of every step, or with half 1 its Y.
    __device__ __forceinline__ void integers(u32 (&a)[4][4], u32 values, int half, int high) const {
        const u32 bytes = half ? values >> 8 : values;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 own = bytes & (i ? 0x00f000f0u : 0x000f000fu), factor = i ? odd : even;
            a[i][2 * half + high] = multiply_add_bf16x2(own, factor, 0x0000be00u);  // - 1 / 8
            a[2 + i][2 * half + high] = multiply_add_bf16x2(high_twice(own), factor, 0x0000be00u);
        }
    }

    __device__ __forceinline__ Fragment decode(uint2 low, uint2 high) const {
        Fragment out;
        const u32 both = select_bytes(low.y, high.y, 0x5410);  // idx2 of the low row, of the high row
        const u32 pair = select_bytes(both, __shfl_xor_sync(~0u, both, 2), bytes);
        const u32 other = rotated(__shfl_xor_sync(~0u, pair, 1), turn);
        const u32 four = select_bits(pair, other, nibbles);
        out.metadata[0] = select_or_flip(four, four * 4, 0x33333333u);
        out.metadata[1] = flip_or_select(four, four >> 2, 0xccccccccu);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            integers(out.a, low.x, half, 0);
            integers(out.a, high.x, half, 1);
        }
        out.low = scale_of(low.y);
        out.high = scale_of(high.y);
        return out;
    }
};

// What a lane has of B: its column is one token's group lane / 8.
struct OwnColumns {
    u32 low, high;  // 1: of k positions of lanes 0 and 1, of lanes 2 and 3

    // has: whether the lane's column is in use. zero: as QuadDecoder's.
    __device__ __forceinline__ OwnColumns(u32 zero, bool has, bool has_high = true) {
        const int t = threadIdx.x % 4, group = threadIdx.x % 32 / 8;
        low = (has && group == t / 2) + zero;
        high = (has && has_high && group == t / 2 + 2) + zero;
    }

    // from: 32 bytes of channel pairs t % 2 of the group, in the order of int4_24_column.cuh. A product by 0
    // or 1 takes no part of the pipe that decodes.
    __device__ __forceinline__ void take(u32 (&b)[4][4], const unsigned char* from) const {
#pragma unroll
        for (int y = 0; y < 2; ++y) {
            const uint4 four = *reinterpret_cast<const uint4*>(from + y * 16);
            const u32 of[4] = {four.x, four.z, four.y, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                b[i][2 * y] = of[i] * low;
                b[i][2 * y + 1] = of[i] * high;
            }
        }
    }
};

// products [16 x 8] = integers of rows [16 x 4 groups] * b / INTEGERS, for M times 16 rows; b: of each step.
// Products that wait for one another lie far apart.
template <int M>
__device__ __forceinline__ void multiply_quads(float (&products)[M][4],
                                               const QuadDecoder::Fragment (&rows)[M], const u32 (&b)[4][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) products[m][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int m = 0; m < M; ++m)
            if (i < 2)
                multiply_unordered<0>(products[m], rows[m].a[i], b[i], rows[m].metadata[i]);
            else
                multiply_unordered<1>(products[m], rows[m].a[i], b[i], rows[m].metadata[i - 2]);
}
