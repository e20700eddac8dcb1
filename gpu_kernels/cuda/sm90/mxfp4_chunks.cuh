// SPDX-License-Identifier: Apache-2.0
// What a thread of mxfp4_mlp loads of a unit of weights.
#pragma once

#include "sm90/mxfp4_place.cuh"

// A unit's chunks of this thread: two rows a part.
struct Chunks : UnitScales {
    u32 words[PARTS][2][4];

    __device__ __forceinline__ void load(int part, int i, u32 from) {
        const uint4 four = load_16(from);
        words[part][i][0] = four.x;
        words[part][i][1] = four.y;
        words[part][i][2] = four.z;
        words[part][i][3] = four.w;
    }
    // weights: of part 0 and the first row.
    __device__ __forceinline__ void load_words(u32 weights, const Place& place) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) load(part, i, weights + part * place.part + i * place.second);
    }
#if BOXED
    // Words and scales of a stage that may have fewer rows or groups: zeros where there are none.
    __device__ __forceinline__ void load_cut(u32 stage, const Place& place, int groups, int unit) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const Chunk chunk = place.chunk(part, groups, unit);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 at = i ? chunk.second : chunk.first;
                load(part, i, stage + place.box() * BOX_BYTES + 16 * at);
                scales[part][i] = load_byte(stage + BOXES * BOX_BYTES + place.box() * BOX_SCALES + at);
                if (!chunk.here)
                    words[part][i][0] = words[part][i][1] = words[part][i][2] = words[part][i][3] =
                        scales[part][i] = 0;
            }
        }
    }
#endif
    __device__ __forceinline__ u32 any() const {
        u32 bits = 0;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) bits |= scales[part][0] | scales[part][1];
        return bits;
    }
};
