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

__device__ __forceinline__ float scale_of(u32 rest) { return __uint_as_float(rest & 0xffff0000u); }

// Two bf16, exactly b - 8 of the low byte b of each half, 0 .. 15; the high bytes of `halves` are 0x43.
// 0x4300 is 128, whose last bit is 1.
__device__ __forceinline__ u32 integers_of(u32 halves) {
    return multiply_add_bf16x2(halves, 0x3f803f80u, 0xc308c308u);  // * 1 - 136
}
