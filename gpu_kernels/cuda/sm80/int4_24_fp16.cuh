// SPDX-License-Identifier: Apache-2.0
// Words of int4_24 as A of sparse products of fp16, with their scales, by the lanes that hold them. Chunks, k
// positions and metadata are those of int4_24_rows.cuh.
//
// A scale has 8 significant bits and an int4 minus 8 at most 3, or is -8. So their product is exact in fp16's
// 11 bits, and no sum is scaled. Scales are multiplied by WEIGHTS, and must lie below 2^4 then; those below
// 2^-25 lose bits.
#pragma once

#include "sm80/int4_24_rows.cuh"
#include "sm80/row_powers.cuh"

constexpr float WEIGHTS = 256.0f;

struct ScaledDecoder {
    u32 own_byte, x, y, second;  // as Decoder's
    u32 exponent;                // 1024 in both halves, whose last bit is 1
    u32 factors;                 // of X: 1; of Y, which is 4 bits higher: 1 / 16

    // zero: 0, which the compiler must not know, so that constants stay in registers.
    __device__ __forceinline__ explicit ScaledDecoder(u32 zero) {
        const Decoder other(zero);
        own_byte = other.own_byte;
        x = other.x;
        y = other.y;
        second = other.second;
        exponent = 0x64006400u + zero;
        factors = 0x2c003c00u + zero;
    }

    // 32 channels of 16 rows.
    struct Fragment {
        u32 a[4], metadata;
    };

    // X in the low half, Y in the high half. Y is 4 bits higher: 1024 + 16 q4, times 1 / 16.
    __device__ __forceinline__ u32 integers(u32 values) const {
        const u32 both = and_or(select_bytes(values, 0, own_byte), 0x00f0000fu, exponent);
        return multiply_add_fp16x2(both, factors, 0xd480e408u);
    }

    // low, high: words of rows l / 4 and l / 4 + 8 of lane l.
    __device__ __forceinline__ Fragment decode(uint2 low, uint2 high) const {
        Fragment out;
        const u32 both = select_bytes(low.y, high.y, 0x5410);  // idx2 of the low row, of the high row
        out.metadata = (both & 0x55555555u) | second;
        const u32 of_x = both * x, of_y = both * y;
        const u32 scales = pack_fp16(scale_of(low.y) * WEIGHTS, scale_of(high.y) * WEIGHTS);
        const u32 of_low = multiply_fp16x2(integers(low.x), first_in_both(scales));
        const u32 of_high = multiply_fp16x2(integers(high.x), second_in_both(scales));
        // copies of the high bits: masks of the second pair
        out.a[2] = of_low & select_bytes(of_x, of_y, 0xdd99);
        out.a[3] = of_high & select_bytes(of_x, of_y, 0xffbb);
        out.a[0] = multiply_add_fp16x2(out.a[2], 0xbc00bc00u, of_low);  // the rest
        out.a[1] = multiply_add_fp16x2(out.a[3], 0xbc00bc00u, of_high);
        return out;
    }
};
