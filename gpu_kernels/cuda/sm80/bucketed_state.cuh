// SPDX-License-Identifier: Apache-2.0
// Sizes of bucketed_attention, and what a warp keeps between steps.
#pragma once

#include "sm80/packed_levels.cuh"

#ifndef TIERS
#define TIERS 65820  // 1 << 2 | 1 << 3 | 1 << 4 | 1 << 8 | 1 << 16
#endif
#ifndef GROUP
#define GROUP 8
#endif
#ifndef QUERIES
#define QUERIES 1  // N
#endif
#ifndef QT
#define QT 1
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef PAGE
#define PAGE 64
#endif
#ifndef CAUSAL
#define CAUSAL 0
#endif
#ifndef ROTATE
#define ROTATE 0
#endif
#ifndef MASS
#define MASS 0
#endif
#if QT > 1
#define REGISTER_WARPS 8  // of a multiprocessor: they bound the registers of a thread
#elif __CUDA_ARCH__ == 900
#define REGISTER_WARPS 16
#else
#define REGISTER_WARPS 12  // elsewhere ptxas needs more than 128 registers
#endif

constexpr int D = 128, KINDS = 5, ROWS = 8 * QT, TILES = (QUERIES * GROUP + ROWS - 1) / ROWS;
constexpr int SLOT = 4096 + 512, VALUES_AT = 2048, SCALES_AT = 4096;  // bytes of a piece
constexpr int Q_BYTES = KINDS * QT * 2048, ROW = D + 4;
constexpr float LOWEST = -1e30f, HEADROOM = 7.0f, MOST_WEIGHT = 32768.0f;  // of fp16's 65504
static_assert(PAGE % 64 == 0, "pages of whole pieces");

__device__ __forceinline__ constexpr int bits_of_kind(int kind) {
    return kind < 3 ? kind + 2 : kind == 3 ? 8 : 16;
}
__device__ __forceinline__ constexpr bool has(int kind) { return TIERS >> bits_of_kind(kind) & 1; }
__device__ __forceinline__ constexpr int tokens_of_piece(int kind) {
    return kind < 3 ? 32 : kind == 3 ? 16 : 8;
}

// What a row and a key/value head have of a tier; payload and scales begin at the head's part of page 0.
struct Tier {
    const unsigned char* payload;
    const uint4* scales;
    const int *ids, *table;
    int count, pieces;
};

struct State {
    float o[QT][8][4], offsets[QT][2], most[QT][2], total[QT][2];
};

__device__ __forceinline__ float power(int n) { return __uint_as_float(bits_of_power(n)); }

// The output between the scales of a tier's pairs and 1.
template <int BITS, bool ENTER>
__device__ __forceinline__ void rescale(State& state) {
    if constexpr (BITS != 16) {
#pragma unroll
        for (int n = 0; n < QT; ++n)
#pragma unroll
            for (int t = 0; t < 8; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int up = 24 - shift_of<BITS>(2 * t + i / 2);
                    state.o[n][t][i] *= power(ENTER ? -up : up);
                }
    }
}
