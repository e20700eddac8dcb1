// SPDX-License-Identifier: Apache-2.0
// Weights of the format mxfp4_boxes (ttnn_moe/formats/mxfp4_boxes.py): where chunks lie, and their bits.
//
// A chunk is 32 channels of a row: 16 bytes, one scale. Blocks and scales list chunks in one order. A
// fragment is 16 rows. A box is up to eight fragments, in stages of eight groups of 32 channels. A stage has
// its fragments in turn; a fragment has units of four groups; a unit has the first half of its rows, then the
// second. The last stage, unit, and box have fewer groups or rows.
//
// Fragments of gate_up pair gate rows, the first half, with their up rows: fragment 4 i + j of a unit of 128
// channels has channels 32 (g / 2) + 4 (g % 2) + 8 i + j of it, g = 0 .. 7. Fragments of down have 16 rows in
// turn.
#pragma once

#include "sm80/bytes.cuh"

#ifndef BOXED
#define BOXED 0
#endif

constexpr int STAGE_GROUPS = 8;

struct Box {
    int before, fragments, rows;  // rows before it; its fragments; rows of a fragment
    bool whole;  // 16 rows. `rows == 16` is wrong: ptxas 13.0 takes a predicate of VIMNMX.RELU for it

    __device__ __forceinline__ static Box of_gate_up(int box, int I) {
        const int left = I / 32 - box / 2 * 4, groups = max(0, min(4, left));
        return {box / 2 * 256 + box % 2 * 32 * groups, 8, 4 * groups, left >= 4};
    }
    __device__ __forceinline__ static Box of_down(int box, int H) {
        return {box * 128, max(0, min(8, H / 16 - box * 8)), 16, true};
    }
    __device__ __forceinline__ int all() const { return fragments * rows; }
};

// Chunks of a lane in a stage of `groups` groups, where a unit lies: of row g and of the same row of the
// second half.
struct Chunk {
    int first, second;
    bool here;  // else those of another row or group stand in

    __device__ __forceinline__ Chunk(int fragment, int rows, int groups, int unit) {
        const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, n = min(4, groups - 4 * unit);
        here = g < rows / 2 && c < n;
        first = rows * (fragment * groups + 4 * unit) + min(g, rows / 2 - 1) * n + min(c, n - 1);
        second = first + rows / 2 * n;
    }
};

constexpr u32 PLACED = 0x81c081c0u;  // sign, two bits of the exponent, one of the mantissa; twice

// Numbers 6 and 7 of eight of both words of a pair.
__device__ __forceinline__ u32 shared_bits(u32 first, u32 second) {
    return select_bits(first, second << 2, 0x06030603u);
}

// Four words of two bf16, times 2^-126, of the eight numbers in the first or the second word of a pair.
// word i: of a chunk, whose pair has words `first` and `second`.
__device__ __forceinline__ void spread_arranged(u32 first, u32 second, int i, u32* out) {
    const u32 shared = shared_bits(first, second), word = i % 2 ? second : first;
    out[0] = word & PLACED;
    out[1] = word << 4 & PLACED;
    out[2] = rotated(word, 26) & PLACED;
    out[3] = (i % 2 ? rotated(shared, 28) : shared << 6) & PLACED;
}
