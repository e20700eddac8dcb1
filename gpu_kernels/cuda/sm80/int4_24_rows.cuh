// SPDX-License-Identifier: Apache-2.0
// Words of int4_24 as A of sparse products, decoded by the lanes that hold them: no shuffles, few
// instructions.
//
// The order of k in a product is free if A, metadata and B agree. Here byte t of a word's values, chunks 2t
// (X) and 2t + 1 (Y), belongs to lane t of a quad, in k positions t and t + 4, four k each:
//
// | k of position | t             | t + 4         | kept there       | index in the metadata |
// |---------------|---------------|---------------|------------------|-----------------------|
// | 0, 1          | X, channels 0, 1 | X, channels 2, 3 | X, of this pair | slot of X         |
// | 2, 3          | Y, channels 0, 1 | Y, channels 2, 3 | Y, of this pair | 2 + slot of Y     |
//
// So the slot needs no decoding: nibble t of idx2, without its pairs and plus 8, is the metadata of both
// positions. Only the pair decides which of the two positions gets a value; the other gets 0.
#pragma once

#include "sm80/bytes.cuh"
#include "sm80/int4_24.cuh"

// The order of channels in memory, in groups of 32: 16 bytes t hold 4t, 4t + 1, 4t + 16, 4t + 17, 4t + 2, 4t
// + 3, 4t + 18, 4t + 19: the words of B of lane t of a quad, in one load.
//
// Where a channel pair (an even channel and the next) of a group of 32 is: of its 16 words.
__device__ __forceinline__ constexpr int word_of(int channel) {
    return channel / 4 % 4 * 4 + channel / 2 % 2 * 2 + channel / 16;
}

// What lane t of a quad needs to decode.
struct Decoder {
    u32 own_byte;  // selector of byte t in both halves, zero-extended
    u32 factors;   // of X, and of Y, which lies 4 bits higher
    u32 x, y;      // factors that shift the pair of X, and of Y, to the high bit of a half
    u32 second;    // index 2 of every chunk's second kept channel

    // zero: 0, which the compiler must not know. So constants stay in registers, and shifts are
    // multiplications: those units are free.
    __device__ __forceinline__ explicit Decoder(u32 zero) {
        const int t = threadIdx.x % 4;
        own_byte = (0x4040 | t * 0x101) + zero;
        factors = 0x7d007f00u + zero;  // 2^127, 2^123
        x = (1u << (14 - 4 * t)) + zero;
        y = (1u << (12 - 4 * t)) + zero;
        second = 0x88888888u + zero;
    }

    // X in the low half, Y in the high half, as (integer - 8) / 64. The last bit of a bf16 below 2^-125 is
    // 2^-133.
    __device__ __forceinline__ u32 integers(u32 values) const {
        return multiply_add_bf16x2(select_bytes(values, 0, own_byte) & 0x00f0000fu, factors,
                                   0xbe00be00u);  // - 1 / 8
    }

    // 32 channels of 16 rows.
    struct Fragment {
        u32 a[4], metadata;
        float low, high;  // scales
    };
    // low, high: words of rows l / 4 and l / 4 + 8 of lane l.
    __device__ __forceinline__ Fragment decode(u32 low, u32 low_rest, u32 high, u32 high_rest) const {
        Fragment out;
        const u32 both = select_bytes(low_rest, high_rest, 0x5410);  // idx2 of the low row, of the high row
        out.metadata = (both & 0x55555555u) | second;
        const u32 of_x = both * x, of_y = both * y;
        const u32 low_integers = integers(low), high_integers = integers(high);
        // copies of the high bits: masks of the second pair
        out.a[2] = low_integers & select_bytes(of_x, of_y, 0xdd99);
        out.a[3] = high_integers & select_bytes(of_x, of_y, 0xffbb);
        out.a[0] = multiply_add_bf16x2(out.a[2], 0xbf80bf80u, low_integers);  // the rest
        out.a[1] = multiply_add_bf16x2(out.a[3], 0xbf80bf80u, high_integers);
        out.low = scale_of(low_rest);
        out.high = scale_of(high_rest);
        return out;
    }
};

// products [16 x 8] = integers of rows [16 x 32] * b / INTEGERS.
__device__ __forceinline__ void multiply_integers(float (&products)[4], const Decoder::Fragment& rows,
                                                  const u32 (&b)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) products[i] = 0.0f;
    multiply_sparse<0>(products, rows.a, b, rows.metadata);
}

// sums += scales * products.
__device__ __forceinline__ void scale(float (&sums)[4], const float (&products)[4], float low, float high) {
    sums[0] = fmaf(products[0], low, sums[0]);
    sums[1] = fmaf(products[1], low, sums[1]);
    sums[2] = fmaf(products[2], high, sums[2]);
    sums[3] = fmaf(products[3], high, sums[3]);
}

__device__ __forceinline__ void multiply_scaled(float (&sums)[4], const Decoder::Fragment& rows,
                                                const u32 (&b)[4]) {
    float products[4];
    multiply_integers(products, rows, b);
    scale(sums, products, rows.low, rows.high);
}
