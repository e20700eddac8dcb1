// SPDX-License-Identifier: Apache-2.0
// Words of int4_24 (ttnn_moe/formats/int4_24.py) as operands of sparse products. A word holds 32 channels of
// a row: eight chunks of four, each of which keeps one.
//
// | bits     | half   | hold                                                             |
// |----------|--------|------------------------------------------------------------------|
// | 0 .. 31  | values | 8 x q4: the kept value of chunk i, plus 8, at bit 4i             |
// | 32 .. 47 | rest   | 8 x idx2: pair * 2 + slot of chunk i, at bit 2i of rest          |
// | 48 .. 63 | rest   | scale: the bits of a bf16                                        |
//
// pair: which two of the four channels A keeps; the metadata of a chunk is IDX_01 or IDX_23. slot: which of
// these two is the kept value; the other is 0. Values are integers: a row's sums are multiplied by its scale.
#pragma once

#include "sm80/sparse.cuh"

#if FP16
#error "int4_24 multiplies bf16"
#endif

constexpr u32 IDX_01 = 0x4, IDX_23 = 0xE;  // metadata: index of the first kept channel, then of the second
constexpr int CHANNELS_OF_WORD = 32;
constexpr float INTEGERS = 64.0f;  // 1 / the factor of integers that the fast kernels decode

// As a word lies in memory.
struct Word {
    u32 values, rest;
};

__device__ __forceinline__ float scale_of(u32 rest) { return __uint_as_float(rest & 0xffff0000u); }

// Two bf16, exactly b - 8 of the low byte b of each half, 0 .. 15; the high bytes of `halves` are 0x43.
// 0x4300 is 128, whose last bit is 1.
__device__ __forceinline__ u32 integers_of(u32 halves) {
    return multiply_add_bf16x2(halves, 0x3f803f80u, 0xc308c308u);  // * 1 - 136
}

// Kept pairs, (value, 0) or (0, value), of chunks t and t + 4.
__device__ __forceinline__ void pairs_of(u32 (&pairs)[2], Word word, int t) {
    const u32 both = integers_of((word.values >> 4 * t & 0x000f000fu) | 0x43004300u);
    const u32 slots = word.rest >> 2 * t;
    pairs[0] = __byte_perm(both, 0, slots & 0x001 ? 0x1044 : 0x4410);
    pairs[1] = __byte_perm(both, 0, slots & 0x100 ? 0x3244 : 0x4432);
}

// Metadata of chunks 4 * part .. 4 * part + 3: of the word whose rest is `low` in the low half, of `high` in
// the high half.
__device__ __forceinline__ u32 metadata_of(u32 low, u32 high, int part) {
    u32 pairs =
        __byte_perm(low, high, part ? 0x5511 : 0x4400) >> 1 & 0x00550055u;  // bits 0, 2, 4, 6 of a half
    pairs = (pairs | pairs << 4) & 0x05050505u;                             // 0, 2, 8, 10
    pairs = (pairs | pairs << 2) & 0x11111111u;                             // 0, 4, 8, 12
    return IDX_01 * 0x11111111u + (IDX_23 - IDX_01) * pairs;
}
