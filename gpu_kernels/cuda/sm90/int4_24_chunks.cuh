// SPDX-License-Identifier: Apache-2.0
// Words of int4_24 (sm80/int4_24.cuh) as A of sparse warpgroup products, a chunk of the format a chunk of A.
//
// The two indices of a chunk of A may come in any order; they only have to differ. So the kept value takes a
// slot of our choice, with idx2 as its index; the other slot holds 0. Byte t of a word's values, chunks 2t
// (X) and 2t + 1 (Y), belongs to lane t of a quad:
//
// | chunk of A | channels of 32   | kept pair | first index | second index |
// |------------|------------------|-----------|-------------|--------------|
// | t          | 8t .. 8t + 3     | (X, 0)    | idx2 of X   | 3 - idx2     |
// | t + 4      | 8t + 4 .. 8t + 7 | (0, Y)    | 3 - idx2    | idx2 of Y    |
//
// Lane 0 gives the metadata of chunks 0 .. 3, lane 1 that of chunks 4 .. 7: nibble t of idx2 holds the
// indices of X and Y.
#pragma once

#include "sm80/bytes.cuh"
#include "sm80/int4_24.cuh"
#include "sm90/sparse.cuh"

// What lane t of a quad needs to decode.
struct ChunkDecoder {
    u32 own_byte;  // selector of byte t: of the low row to the low half, of the high row to the high half
    u32 first, second;  // factors of X and 0, and of 0 and Y, which lies 4 bits higher
    u32 turn, kept;     // of idx2: bits to the other index, and those of this lane's index

    // zero: 0, which the compiler must not know, so that constants stay in registers.
    __device__ __forceinline__ explicit ChunkDecoder(u32 zero) {
        const int t = threadIdx.x % 4;
        own_byte = (0x4400 + t * 0x1111) + zero;
        first = 0x7f00u + zero;       // 2^127
        second = 0x7d000000u + zero;  // 2^123
        turn = (t % 2 ? 30 : 2) + zero;
        kept = (t % 2 ? 0xccccccccu : 0x33333333u) + zero;
    }

    // 32 channels of 16 rows, as (integer - 8) / 64.
    struct Fragment {
        u32 a[4], metadata;
        float low, high;  // scales
    };

    // A of values of the low and of the high row. The last bit of a bf16 below 2^-125 is 2^-133.
    __device__ __forceinline__ void values(u32 (&a)[4], u32 low, u32 high) const {
        const u32 both = select_bytes(low, high, own_byte), x = both & 0x000f000fu, y = both & 0x00f000f0u;
        a[0] = multiply_add_bf16x2(x, first, 0x0000be00u);  // - 1 / 8
        a[1] = multiply_add_bf16x2(high_twice(x), first, 0x0000be00u);
        a[2] = multiply_add_bf16x2(low_twice(y), second, 0xbe000000u);
        a[3] = multiply_add_bf16x2(y, second, 0xbe000000u);
    }

    // Of words whose rests these are. Even lanes give chunks 0 .. 3, odd ones 4 .. 7.
    __device__ __forceinline__ u32 metadata(u32 low_rest, u32 high_rest) const {
        const u32 both = select_bytes(low_rest, high_rest, 0x5410);  // idx2 of the low row, of the high row
        return select_or_flip(both, rotated(both, turn), kept);
    }

    // low, high: words of rows l / 4 and l / 4 + 8 of lane l.
    __device__ __forceinline__ void decode(Fragment& out, u32 low, u32 low_rest, u32 high,
                                           u32 high_rest) const {
        out.metadata = metadata(low_rest, high_rest);
        values(out.a, low, high);
        out.low = scale_of(low_rest);
        out.high = scale_of(high_rest);
    }

    // Both groups of words: lanes 0 and 1 of four give the metadata of the first, lanes 2 and 3 of the
    // second.
    __device__ __forceinline__ void decode(Fragment (&out)[2], uint4 low, uint4 high) const {
        const bool is_first = threadIdx.x % 4 < 2;
        out[0].metadata = out[1].metadata = metadata(is_first ? low.y : low.w, is_first ? high.y : high.w);
        values(out[0].a, low.x, high.x);
        values(out[1].a, low.z, high.z);
        out[0].low = scale_of(low.y);
        out[0].high = scale_of(high.y);
        out[1].low = scale_of(low.w);
        out[1].high = scale_of(high.w);
    }
};
