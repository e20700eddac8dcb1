// SPDX-License-Identifier: Apache-2.0
// A unit of 32 tokens for bucketed_prompt: scores, weights, the sums of values. A warp has 16 * MT queries.
#pragma once

#include "sm80/halves.cuh"
#include "sm80/mma.cuh"

#ifndef GROUP
#define GROUP 8
#endif
#ifndef PAGE
#define PAGE 64
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef TIERS
#define TIERS 65820  // 1 << 2 | 1 << 3 | 1 << 4 | 1 << 8 | 1 << 16
#endif
#ifndef ROTATE
#define ROTATE 1
#endif

#ifndef MT
#define MT 2  // tiles of 16 queries of a warp
#endif
static_assert(WARPS == 4 && MT == 2, "other cuts spill registers");
constexpr int ROWS = 16 * MT * WARPS, KINDS = 6, OWN = 5, STAGES = 3;
constexpr int Q_BYTES = ROWS * 256, SCALES_AT = 16384, STAGE = SCALES_AT + 128;
constexpr float LOWEST = -1e30f, HEADROOM = 7.0f;

__device__ __forceinline__ constexpr int bits_of_kind(int kind) {
    return kind < 3 ? kind + 2 : kind == 3 ? 8 : 16;
}
__device__ __forceinline__ constexpr bool has(int kind) {
    return kind == OWN || (TIERS >> bits_of_kind(kind) & 1);
}
__device__ __forceinline__ float power(int n) { return __uint_as_float(static_cast<u32>(127 + n) << 23); }

struct State {
    float o[MT][16][4], most[MT][2], total[MT][2], offset[MT][2];
};

// Pair c of 16 of a block of 8 tokens, from its BITS words: two denormal fp16 numbers, level * 2^-24.
template <int BITS>
__device__ __forceinline__ u32 level_pair(const u32* words, int c) {
    if (BITS == 2) return words[c / 8] >> 2 * (c % 8) & 0x00030003u;
    if (BITS == 3) {
        if (c == 15)
            return (words[0] >> 15 & 0x00010001u) | (words[1] >> 14 & 0x00020002u) |
                   (words[2] >> 13 & 0x00040004u);
        return words[c / 5] >> 3 * (c % 5) & 0x00070007u;
    }
    if (BITS == 4) return words[c / 4] >> 4 * (c % 4) & 0x000f000fu;
    if (BITS == 8) return __byte_perm(words[c / 2], 0, c % 2 ? 0x4341 : 0x4240);
    return words[c];  // bf16
}

__device__ __forceinline__ u32 bf16_of(u32 fp16) { return pack(first_of_fp16(fp16), second_of_fp16(fp16)); }

__device__ __forceinline__ void load_four(u32* words, const uint4* from) {
    const uint4 four = *from;
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
}

// The product of a tile: bf16 operands for 16 bits, fp16 ones for fewer.
template <int BITS>
__device__ __forceinline__ void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (BITS == 16)
        multiply_add(sums, a, b0, b1);
    else
        multiply_add_fp16(sums, a, b0, b1);
}

template <int BITS>
__device__ __forceinline__ void score(float (&scores)[MT][4][4], const uint4* keys, const uint4* q) {
    constexpr int STEPS = BITS <= 4   ? 8
                          : BITS == 8 ? 4
                                      : 2;       // of 16 channels, whose words are loaded at once
    constexpr int WORDS = BITS <= 4 ? BITS : 4;  // of a block of 8 tokens
    u32 words[4 * WORDS];
#pragma unroll
    for (int step = 0; step < 8; ++step) {
        if (step % STEPS == 0) {
            if (BITS <= 4) {
#pragma unroll
                for (int i = 0; i < BITS; ++i) load_four(words + 4 * i, keys + i * 32);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    load_four(words + 4 * i, keys + (i * BITS / 4 + step / STEPS) * 32);
            }
        }
        u32 a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            load_four(a[m], q + (m * 8 + step) * 32);
            if (BITS == 16)
#pragma unroll
                for (int i = 0; i < 4; ++i) a[m][i] = bf16_of(a[m][i]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int c = 2 * (step % STEPS);
            const u32 b0 = level_pair<BITS>(words + i * WORDS, c),
                      b1 = level_pair<BITS>(words + i * WORDS, c + 1);
#pragma unroll
            for (int m = 0; m < MT; ++m) multiply<BITS>(scores[m][i], a[m], b0, b1);
        }
    }
}

// out += weights * values. held: masks of the lane's pairs of tokens, by block; 16 bits alone may hold NaN.
template <int BITS>
__device__ __forceinline__ void add_values(State& state, const float (&weights)[MT][4][4],
                                           const uint4* values, const u32 (&held)[4]) {
    constexpr int TILES = BITS <= 4   ? 16
                          : BITS == 8 ? 8
                                      : 4;  // of 8 channels, whose words are loaded at once
    constexpr int WORDS = BITS <= 4 ? BITS : 4;
    u32 words[BITS == 3 ? 12 : 2 * WORDS];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        u32 a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float first = weights[m][2 * j + i / 2][i % 2 * 2],
                            second = weights[m][2 * j + i / 2][i % 2 * 2 + 1];
                a[m][i] = BITS == 16 ? pack(first, second) : pack_fp16(first, second);
            }
        if (BITS == 2) load_four(words, values + j * 32);
        if (BITS == 3 && j == 0)
#pragma unroll
            for (int i = 0; i < 3; ++i) load_four(words + 4 * i, values + i * 32);
        if (BITS == 4) load_four(words, values + 2 * j * 32), load_four(words + 4, values + (2 * j + 1) * 32);
#pragma unroll
        for (int c = 0; c < 16; ++c) {
            if (BITS > 4 && c % TILES == 0) {
                load_four(words, values + (2 * j * BITS / 4 + c / TILES) * 32);
                load_four(words + 4, values + ((2 * j + 1) * BITS / 4 + c / TILES) * 32);
            }
            const u32* low = words + (BITS == 3 ? 6 * j : 0);
            u32 b0 = level_pair<BITS>(low, c % TILES), b1 = level_pair<BITS>(low + WORDS, c % TILES);
            if (BITS == 16) b0 &= held[2 * j], b1 &= held[2 * j + 1];
#pragma unroll
            for (int m = 0; m < MT; ++m) multiply<BITS>(state.o[m][c], a[m], b0, b1);
        }
    }
}

// A unit in shared memory. left: its slots in use. factors: of the warp's rows. sees: CAUSAL: the last slot
// that each of the lane's rows sees.
template <int BITS, bool CAUSAL>
__device__ __forceinline__ void attend(State& state, const unsigned char* stage, const uint4* q,
                                       const float2* factors, int left, const int (&sees)[MT][2]) {
    constexpr float HALF = BITS == 16 ? 0.0f : ((1 << BITS) - 1) * 0.5f;
    const float times = BITS == 16 ? power(-24) : 1.0f;
    const int lane = threadIdx.x % 32;
    float scores[MT][4][4] = {};
    score<BITS>(scores, reinterpret_cast<const uint4*>(stage) + lane, q);

    float scale[2][4], log_v[2][4], inverse_v[2][4];
    u32 held[4] = {};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        u32 words[4];
        load_four(words, reinterpret_cast<const uint4*>(stage + SCALES_AT) + lane % 4 * 2 + e);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float k = first_of_fp16(words[i]), v = second_of_fp16(words[i]);
            const bool is = 8 * i + lane % 4 * 2 + e < left && !(k < 0.0f);
            scale[e][i] = is ? k : 0.0f;
            log_v[e][i] = is ? logarithm_to_two(v) : __int_as_float(0xff800000);
            inverse_v[e][i] = is ? inverse_of(v) : 0.0f;
            held[i] |= is ? 0xffffu << 16 * e : 0u;
        }
    }
    bool higher = false;
    float most[MT][2];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float2 factor = factors[16 * m + 8 * h + lane / 4];
            const float by = factor.x * times, less = -HALF * factor.y;
            float best = LOWEST;
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& s = scores[m][i][2 * h + e];
                    s = fmaf(fmaf(s, by, less), scale[e][i], log_v[e][i]);
                    if (BITS == 16 && !(held[i] >> 16 * e & 1)) s = log_v[e][i];  // a key of NaN that is none
                    if (CAUSAL && 8 * i + lane % 4 * 2 + e > sees[m][h]) s = __int_as_float(0xff800000);
                    best = fmaxf(best, s);
                }
            most[m][h] = best;
            higher |= best > state.most[m][h] + 8.0f;
        }
    if (__ballot_sync(~0u, higher)) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float best = fmaxf(most[m][h], state.most[m][h]);
                best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
                best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
                const float shrink = power_of_two(state.most[m][h] - best);
                state.most[m][h] = best;
                state.total[m][h] *= shrink;
                state.offset[m][h] *= shrink;
#pragma unroll
                for (int c = 0; c < 16; ++c)
                    state.o[m][c][2 * h] *= shrink, state.o[m][c][2 * h + 1] *= shrink;
            }
    }
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float base = state.most[m][h] - HEADROOM;
            float weights = 0, sum = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& s = scores[m][i][2 * h + e];
                    s = power_of_two(s - base);
                    weights += s;
                    sum = fmaf(s, inverse_v[e][i], sum);
                }
            state.offset[m][h] = fmaf(HALF, weights, state.offset[m][h]);
            state.total[m][h] += sum;
        }
    add_values<BITS>(state, scores, reinterpret_cast<const uint4*>(stage + 512 * BITS) + lane, held);
}

__device__ __forceinline__ void rescale(State& state, float by) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int c = 0; c < 16; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) state.o[m][c][i] *= by;
}

// Rows of the output times the Hadamard matrix: a lane has channels 8 * c + 2 * (lane % 4) and the next.
__device__ __forceinline__ void rotate_rows(float (&o)[16][4]) {
#pragma unroll
    for (int h = 0; h < 4; h += 2) {
#pragma unroll
        for (int c = 0; c < 16; ++c) {
            const float a = o[c][h], b = o[c][h + 1];
            o[c][h] = a + b, o[c][h + 1] = a - b;
#pragma unroll
            for (int step = 1; step < 4; step *= 2)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float other = __shfl_xor_sync(~0u, o[c][h + e], step);
                    o[c][h + e] = threadIdx.x & step ? other - o[c][h + e] : o[c][h + e] + other;
                }
        }
#pragma unroll
        for (int step = 1; step < 16; step *= 2)
#pragma unroll
            for (int c = 0; c < 16; ++c)
                if (!(c & step))
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float a = o[c][h + e], b = o[c | step][h + e];
                        o[c][h + e] = a + b, o[c | step][h + e] = a - b;
                    }
#pragma unroll
        for (int c = 0; c < 16; ++c) o[c][h] *= 0.08838834764831845f, o[c][h + 1] *= 0.08838834764831845f;
    }
}
