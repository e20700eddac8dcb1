// SPDX-License-Identifier: Apache-2.0
// MXFP4 weights as fragments of a warpgroup product, and the order of channels that this takes.
//
// A unit is 128 channels: 64 bytes of a row of weights. Lane c of four lanes takes bytes 16 c .. 16 c + 15,
// so one group of 32 channels and one scale. Word i of them makes the fragments of steps 2 i and 2 i + 1 of
// 16 channels. Four bits j of the low half of a word, and four bits j of its high half, make word j of eight
// elements: channels 32 c + 8 i + j and 32 c + 8 i + 4 + j. Rows of activations hold channels in this order:
// position 16 (2 i + j / 2) + 8 (j % 2) + 2 c + h holds channel 32 c + 8 i + 4 h + j.
#pragma once

#include "sm80/mxfp4_boxes.cuh"
#include "sm90/ptx.cuh"

constexpr int UNIT = 128;

// Four words of two bf16, times 2^-126, of the eight e2m1 numbers in a word.
__device__ __forceinline__ void spread(u32 word, u32* out) {
    // a sign belongs in bit 15, the other three bits belong in bits 8 .. 6: one multiplication shifts both
    const u32 lower = word >> 6;
    out[0] = (word & 0x000f000f) * 0x1040 & 0x81c081c0;
    out[1] = (word & 0x00f000f0) * 0x0104 & 0x81c081c0;
    out[2] = (lower & 0x003c003c) * 0x0410 & 0x81c081c0;
    out[3] = (word & 0x80008000) | (lower & 0x01c001c0);
}

// The same of word i of a chunk; BOXED: of the arranged words of the pair that has it.
template <typename Words>
__device__ __forceinline__ void spread_word(const Words& words, int i, u32* out) {
#if BOXED
    spread_arranged(words[i / 2 * 2], words[i / 2 * 2 + 1], i, out);
#else
    spread(words[i], out);
#endif
}

// What spread numbers of a scale are multiplied by, twice: 2^(scale - 127 + 126), as far as bf16 goes, in
// `factor`; the rest, 1 for scales up to 128, is `rest_of`.
__device__ __forceinline__ u32 factor(u32 scale) { return min(scale, 128u) * 0x00800080 + 0x3f003f00; }
// The same of a scale that is at most 128, in one instruction.
__device__ __forceinline__ u32 small_factor(u32 scale) { return scale * 0x00800080 + 0x3f003f00; }
__device__ __forceinline__ u32 rest_of(u32 scale) {
    return scale == 255 ? 0x7fff7fff : (max(scale, 128u) - 1) * 0x00800080;
}
