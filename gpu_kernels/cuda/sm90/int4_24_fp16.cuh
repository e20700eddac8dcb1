// SPDX-License-Identifier: Apache-2.0
// int4_24 in fp16: words as A of sparse products, with their scales, and what takes rows to fp16.
//
// A scale has 8 significant bits and an int4 minus 8 at most 3, or is -8. So their product is exact in fp16's
// 11 bits, and a product of a row needs no scaled sums. Scales are multiplied by WEIGHTS, and must lie below
// 2^4 then; those below 2^-25 lose bits.
//
// Four groups of 32 channels go at a time. Lane t of a quad owns the words of group t: it decodes whole
// words, so that a warp decodes none twice. Step i of four takes two chunks of each word: X in k position t,
// Y in t + 4.
//
// | step | X | Y |
// |------|---|---|
// | 0    | 0 | 2 |
// | 1    | 1 | 3 |
// | 2    | 4 | 6 |
// | 3    | 5 | 7 |
//
// The two indices of a chunk of A may come in any order; they only have to differ. So the kept value comes
// first, with idx2 as its index; the other is 0, with the index 3 - idx2.
#pragma once

#include "sm80/bytes.cuh"
#include "sm80/int4_24.cuh"
#include "sm80/row_powers.cuh"
#include "sm90/sparse.cuh"

constexpr float WEIGHTS = 256.0f;

struct ScaledDecoder {
    u32 bytes;          // selector of what this pair of lanes needs, of its own and of the other pair's words
    u32 turn, nibbles;  // bits to turn the neighbour's nibbles by; those of its own that this lane keeps
    u32 exponent;       // 1024 in both halves, whose last bit is 1

    // zero: 0, which the compiler must not know, so that constants stay in registers.
    __device__ __forceinline__ explicit ScaledDecoder(u32 zero) {
        const int t = threadIdx.x % 4;
        bytes = (t < 2 ? 0x6240 : 0x3715) + zero;
        turn = (t % 2 ? 28 : 4) + zero;
        nibbles = (t % 2 ? 0xf0f0f0f0u : 0x0f0f0f0fu) + zero;
        exponent = 0x64006400u + zero;
    }

    // What a lane's words have in common. metadata: of even steps, of odd ones; lanes 0 and 1 of four give
    // steps 0 and 1, the others steps 2 and 3. Scales: in the low half; the high one is 0.
    struct Both {
        u32 low, high, low_scale, high_scale, metadata[2];
    };
    // A of some steps.
    template <int STEPS>
    struct Fragment {
        u32 a[STEPS][4];
    };

    // X and Y of a row: of steps `first` and first + 2, and where there are four of first + 1 and first + 3.
    template <int STEPS>
    __device__ __forceinline__ void weights(Fragment<STEPS>& out, u32 values, u32 scale, int first,
                                            int high) const {
#pragma unroll
        for (int y = 0; y < 2; ++y) {
            const u32 of = y ? values >> 8 : values;
#pragma unroll
            for (int i = 0; i < STEPS / 2; ++i) {
                // 4 bits higher: 1024 + 16 q4, times 1 / 16
                const u32 both =
                    first + i
                        ? multiply_add_fp16x2(and_or(of, 0x00f000f0u, exponent), 0x2c002c00u, 0xd480d480u)
                        : multiply_add_fp16x2(and_or(of, 0x000f000fu, exponent), 0x3c003c00u, 0xe408e408u);
                out.a[i][2 * y + high] = multiply_fp16x2(low_twice(both), scale);
                out.a[STEPS / 2 + i][2 * y + high] = multiply_fp16x2(high_twice(both), scale);
            }
        }
    }

    static __device__ __forceinline__ u32 scale(u32 rest) {
        return pack_fp16(scale_of(rest) * WEIGHTS, 0.0f);
    }

    // low, high: this lane's words of rows l / 4 and l / 4 + 8.
    __device__ __forceinline__ Both begin(uint2 low, uint2 high) const {
        const u32 both = select_bytes(low.y, high.y, 0x5410);  // idx2 of the low row, of the high row
        const u32 pair = select_bytes(both, __shfl_xor_sync(~0u, both, 2), bytes);
        const u32 other = rotated(__shfl_xor_sync(~0u, pair, 1), turn);
        const u32 four = select_bits(pair, other, nibbles);
        return Both{
            low.x,
            high.x,
            scale(low.y),
            scale(high.y),
            {select_or_flip(four, four * 4, 0x33333333u), flip_or_select(four, four >> 2, 0xccccccccu)}};
    }

    template <int STEPS>
    __device__ __forceinline__ void decode(Fragment<STEPS>& out, const Both& of, int first) const {
        weights(out, of.low, of.low_scale, first, 0);
        weights(out, of.high, of.high_scale, first, 1);
    }
};

// Channels of a row in the order of k, what a product of warps reads: 128 at a time, in 16 units of eight.
// Unit 2 v + h has four channels from 64 h + first_of(v) on, and four from 32 further on.
__device__ __forceinline__ constexpr int first_of(int v) { return (v / 4 * 4 + v / 2 % 2 + v % 2 * 2) * 4; }
constexpr int UNIT_CHANNELS = 8, UNITS = 16, BLOCK_CHANNELS = 128, HALF_CHANNELS = 64;

__device__ __forceinline__ constexpr int padded(int channels) {
    return (channels + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS * BLOCK_CHANNELS;
}
