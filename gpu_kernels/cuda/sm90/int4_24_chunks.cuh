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
// Lane 0 gives the metadata of chunks 0 .. 3, lane 1 that of chunks 4 .. 7. Nibble t of idx2 holds the indices
// of X and Y: so 12 - 3 X, or 3 + 3 Y, is the metadata.
#pragma once

#include "sm80/bytes.cuh"
#include "sm80/int4_24.cuh"
#include "sm90/ptx.cuh"

constexpr float INTEGERS = 64.0f;  // 1 / the factor of decoded integers

// What lane t of a quad needs to decode.
struct ChunkDecoder {
    u32 own_byte;      // selector of byte t in both halves, zero-extended
    u32 first, second; // factors of X and 0, and of 0 and Y, which lies 4 bits higher
    u32 shift, factor, sum;  // of indices

    // zero: 0, which the compiler must not know, so that constants stay in registers.
    __device__ __forceinline__ explicit ChunkDecoder(u32 zero) {
        const int t = threadIdx.x % 4;
        own_byte = (0x4040 | t * 0x101) + zero;
        first = 0x7f00u + zero;        // 2^127
        second = 0x7d000000u + zero;   // 2^123
        shift = (t == 1 ? 2 : 0) + zero;
        factor = (t == 1 ? 3 : -3) + zero;
        sum = (t == 1 ? 0x33333333u : 0xccccccccu) + zero;
    }

    // 32 channels of 16 rows: scale * (integer - 8) / 64, exactly a - rest.
    struct Fragment {
        u32 a[4], rest[4], metadata;
        float low, high;
    };

    __device__ __forceinline__ void values(u32& x, u32& y, u32 values) const {
        // the last bit of a bf16 below 2^-125 is 2^-133; - 1 / 8
        const u32 both = select_bytes(values, 0, own_byte) & 0x00f0000fu;
        x = multiply_add_bf16x2(both, first, 0x0000be00u);
        y = multiply_add_bf16x2(both, second, 0xbe000000u);
    }

    // low, high: words of rows l / 4 and l / 4 + 8 of lane l.
    __device__ __forceinline__ void decode(Fragment& out, uint2 low, uint2 high) const {
        const u32 both = select_bytes(low.y, high.y, 0x5410);  // idx2 of the low row, of the high row
        out.metadata = (both >> shift & 0x33333333u) * factor + sum;
        u32 integers[4];
        values(integers[0], integers[2], low.x);
        values(integers[1], integers[3], high.x);
#if SPLIT
        const u32 scales[2] = {select_bytes(low.y, 0, 0x3232), select_bytes(high.y, 0, 0x3232)};
        const u32 negative[2] = {multiply_pairs(scales[0], 0xbf80bf80u), multiply_pairs(scales[1], 0xbf80bf80u)};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            out.a[i] = multiply_pairs(integers[i], scales[i % 2]);
            out.rest[i] = multiply_add_bf16x2(integers[i], negative[i % 2], out.a[i]);
        }
#else
#pragma unroll
        for (int i = 0; i < 4; ++i) out.a[i] = integers[i];
        out.low = scale_of(low.y);
        out.high = scale_of(high.y);
#endif
    }
};
