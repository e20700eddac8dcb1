// SPDX-License-Identifier: Apache-2.0
// Sizes of a block and the place of each thread, the same in both kernels.
#pragma once

#include "common/copies.cuh"
#include "sm80/int4_24.cuh"

#ifndef WORDS_AHEAD
#define WORDS_AHEAD 4  // steps of 64 channels whose words a lane has requested before it needs them
#endif

constexpr int NTOK = 8, KTILE = 32;
constexpr int TB = 128, NWARP = TB / 32;
constexpr int PHASES = 2, PHASE_ROWS = 16 * NWARP, OTILE_CTA = PHASES * PHASE_ROWS;
constexpr int KROW_BYTES = NTOK * 2;  // of Xsh: one channel of the block's tokens

static_assert(TB == 128 && NWARP == 4 && NTOK == 8 && KTILE == 32, "CTA=128, NWARP=4, NTOK=8, KTILE=32");
static_assert(OTILE_CTA == 128 && PHASES == 2 && PHASE_ROWS == 64, "OTILE_CTA=128 via 2x64 phases");
static_assert(KROW_BYTES == 16, "an 8 x 8 matrix of ldmatrix is eight rows of Xsh");
static_assert(KTILE == CHANNELS_OF_WORD, "a word, a half of g2, is one product");
static_assert(IDX_01 == 0x4 && IDX_23 == 0xE, "IDX_01=0x4, IDX_23=0xE");
static_assert(WORDS_AHEAD >= 1, "words are requested before they are staged");

// Lane mapping, pinned. Sum i of a lane: row group + (i >= 2 ? 8 : 0) of the warp's 16, token 2t + (i & 1).
struct Lane {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, t = lane & 3;

    __device__ __forceinline__ int row(int i) const { return group + (i >= 2 ? 8 : 0); }
    __device__ __forceinline__ int token(int i) const { return 2 * t + (i & 1); }
};

// Rows of one expert in X_perm that a block multiplies: its first tile of NTOK, and those gridDim.x tiles
// further on.
struct TokenTiles {
    int first, end;

    __device__ __forceinline__ TokenTiles(const int* OffE, const int* Eids) : first(0), end(0) {
        const int eid = expert(Eids);
        if (eid < 0) return;
        first = OffE[eid] + blockIdx.x * NTOK;
        end = OffE[eid + 1];
    }
    static __device__ __forceinline__ int expert(const int* Eids) {
        return Eids ? Eids[blockIdx.y] : static_cast<int>(blockIdx.y);
    }
};
