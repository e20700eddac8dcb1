// SPDX-License-Identifier: Apache-2.0
// Words of int4_24 as A of sparse products with few columns: four groups of 32 channels at a time, and two
// tokens a product.
//
// Lane t of a quad owns the words of group t: it decodes whole words, so that a warp decodes none twice. Step
// i of four takes chunks 2i and 2i + 1 of each word (X, Y), in k positions t and t + 4 as int4_24_rows.cuh
// has them. So nibble i of idx2 is the metadata.
//
// So a product mixes four groups. B keeps them apart: columns 2g and 2g + 1 hold
// two tokens' channels of group g alone, and zeros in the k of other groups. The sums of lane t are then
// those of its own words, whose scale it has.
#pragma once

#include "sm80/int4_24_rows.cuh"

struct QuadDecoder {
    u32 factors, second;
    u32 bytes;  // selector of what this pair of lanes needs, of its own and of the other pair's words

    // zero: 0, which the compiler must not know, so that constants stay in registers.
    __device__ __forceinline__ explicit QuadDecoder(u32 zero) {
        factors = 0x7d007f00u + zero;  // 2^127; 2^123, of what lies 4 bits higher
        second = 0x88888888u + zero;
        bytes = (threadIdx.x % 4 < 2 ? 0x6240 : 0x3715) + zero;
    }

    // Four steps. metadata: of steps 0 and 1 in lanes 0 and 1 of four, of 2 and 3 in the others.
    struct Fragment {
        u32 a[4][4], metadata[2];
        float low, high;  // scales
    };

    // As int4_24_rows.cuh's, of step i.
    __device__ __forceinline__ u32 integers(u32 values, int i) const {
        return multiply_add_bf16x2(select_bytes(values, 0, 0x4040 | i * 0x101) & 0x00f0000fu, factors,
                                   0xbe00be00u);
    }

    // low, high: this lane's words of rows l / 4 and l / 4 + 8.
    __device__ __forceinline__ Fragment decode(uint2 low, uint2 high) const {
        Fragment out;
        const u32 both = select_bytes(low.y, high.y, 0x5410);  // idx2 of the low row, of the high row
        // nibbles of a half: metadata of steps 0 .. 3. Four lanes' make that of a product.
        const u32 slots = (both & 0x55555555u) | second;
        const int lane = threadIdx.x % 32;
        const u32 pair = select_bytes(slots, __shfl_xor_sync(~0u, slots, 2), bytes);
        const u32 even = __shfl_sync(~0u, pair, lane & ~1), odd = __shfl_sync(~0u, pair, lane | 1);
        out.metadata[0] = select_bits(odd * 16, even, 0xf0f0f0f0u);
        out.metadata[1] = select_bits(odd, even >> 4, 0xf0f0f0f0u);
        // pairs, as the high bits of bytes
        const u32 by_2 = both * 4, by_4 = both * 16, by_6 = both * 64;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 x = i % 2 ? by_2 : by_6, y = i % 2 ? both : by_4;
            const u32 of_low = integers(low.x, i), of_high = integers(high.x, i);
            out.a[i][2] = of_low & select_bytes(x, y, i < 2 ? 0xcc88 : 0xdd99);
            out.a[i][3] = of_high & select_bytes(x, y, i < 2 ? 0xeeaa : 0xffbb);
            out.a[i][0] = multiply_add_bf16x2(out.a[i][2], 0xbf80bf80u, of_low);  // the rest
            out.a[i][1] = multiply_add_bf16x2(out.a[i][3], 0xbf80bf80u, of_high);
        }
        out.low = scale_of(low.y);
        out.high = scale_of(high.y);
        return out;
    }
};

// products [16 x 8] = integers of rows [16 x 4 groups] * b / INTEGERS, for M times 16 rows and PAIRS columns;
// b: of each step. Products that wait for one another lie far apart.
template <int M, int PAIRS>
__device__ __forceinline__ void multiply_quads(float (&products)[M][PAIRS][4],
                                               const QuadDecoder::Fragment (&rows)[M],
                                               const u32 (&b)[PAIRS][4][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int j = 0; j < PAIRS; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) products[m][j][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int j = 0; j < PAIRS; ++j)
                if (i < 2)
                    multiply_sparse<0>(products[m][j], rows[m].a[i], b[j][i], rows[m].metadata[i % 2]);
                else
                    multiply_sparse<1>(products[m][j], rows[m].a[i], b[j][i], rows[m].metadata[i % 2]);
}
