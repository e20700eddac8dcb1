// SPDX-License-Identifier: Apache-2.0
// A piece of bucketed_attention: scores, weights, the sums of values.
#pragma once

#include "sm80/bucketed_state.cuh"
#include "sm80/halves.cuh"
#include "sm80/mma.cuh"

// What a lane knows of a token: of row lane / 4 of a block, or 8 further.
struct Token {
    float scale, log_v, inverse_v;
    bool held;

    __device__ __forceinline__ Token(u32 scales, bool inside) {
        scale = first_of_fp16(scales);
        const float v = second_of_fp16(scales);
        held = inside && !(scale < 0.0f);
        scale = held ? scale : 0.0f;
        log_v = held ? logarithm_to_two(v) : __int_as_float(0xff800000);
        inverse_v = held ? inverse_of(v) : 0.0f;
    }
};

struct Queries {
    int sees[QT][2];  // CAUSAL: position of the lane's queries

    __device__ __forceinline__ bool hidden(int n, int i, int id) const { return CAUSAL && id > sees[n][i]; }
};

// Scores to weights, in place; M of them, of tokens lane / 4 + 8 * m.
template <int M>
__device__ __forceinline__ void weigh(State& state, float (&scores)[(M + 1) / 2][QT][4],
                                      const float2* factors, const Token* tokens, float half, float times,
                                      const int* ids, const Queries& queries, float* mass) {
    float weights[QT][2][M], sums[QT][2];
    bool higher = false;
#pragma unroll
    for (int n = 0; n < QT; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 factor = factors[8 * n + threadIdx.x % 4 * 2 + i];
            const float by = factor.x * times, less = -half * factor.y;
            const float base = state.most[n][i] - HEADROOM;
            float sum = 0;
#pragma unroll
            for (int m = 0; m < M; ++m) {
                float& score = scores[m / 2][n][m % 2 * 2 + i];
                score = fmaf(fmaf(score, by, less), tokens[m].scale, tokens[m].log_v);
                if (times != 1.0f && !tokens[m].held) score = tokens[m].log_v;  // a key of NaN that is none
                if (CAUSAL && ids && queries.hidden(n, i, ids[m])) score = __int_as_float(0xff800000);
                weights[n][i][m] = power_of_two(score - base);
                sum += weights[n][i][m];
            }
            sums[n][i] = sum;
            higher |= !(sum <= MOST_WEIGHT);
        }
    if (__ballot_sync(~0u, higher)) {
#pragma unroll
        for (int n = 0; n < QT; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float best = state.most[n][i];
#pragma unroll
                for (int m = 0; m < M; ++m) best = fmaxf(best, scores[m / 2][n][m % 2 * 2 + i]);
#pragma unroll
                for (int step = 4; step < 32; step *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, step));
                const float shrink = power_of_two(state.most[n][i] - best);
                state.most[n][i] = best;
                state.total[n][i] *= shrink;
                state.offsets[n][i] *= shrink;
                sums[n][i] = 0;
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    weights[n][i][m] = power_of_two(scores[m / 2][n][m % 2 * 2 + i] - (best - HEADROOM));
                    sums[n][i] += weights[n][i][m];
                }
#pragma unroll
                for (int t = 0; t < 8; ++t) {
                    state.o[n][t][i] *= shrink;
                    state.o[n][t][i + 2] *= shrink;
                }
            }
    }
#pragma unroll
    for (int n = 0; n < QT; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float total = 0;
#pragma unroll
            for (int m = 0; m < M; ++m) {
                scores[m / 2][n][m % 2 * 2 + i] = weights[n][i][m];
                total = fmaf(weights[n][i][m], tokens[m].inverse_v, total);
            }
            state.offsets[n][i] = fmaf(half, sums[n][i], state.offsets[n][i]);
            state.total[n][i] += total;
            if (MASS) {
#pragma unroll
                for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
                if (threadIdx.x % 32 < 4)
                    mass[8 * n + threadIdx.x % 4 * 2 + i] =
                        state.most[n][i] - HEADROOM + logarithm_to_two(total);
            }
        }
}

__device__ __forceinline__ void load_queries(u32 (&words)[16], const uint4* q, int n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const uint4 four = q[(n * 4 + j) * 32 + threadIdx.x % 32];
        words[4 * j] = four.x, words[4 * j + 1] = four.y, words[4 * j + 2] = four.z,
                  words[4 * j + 3] = four.w;
    }
}

template <int N>
__device__ __forceinline__ void load_words(u32 (&words)[N], const uint4* from) {
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
        const uint4 four = from[j * 32];
        words[4 * j] = four.x, words[4 * j + 1] = four.y, words[4 * j + 2] = four.z,
                  words[4 * j + 3] = four.w;
    }
}

// A piece of 2, 3, 4 or 8 bits from a slot. part: of its unit. left: tokens of the piece and after it that
// are in use.
template <int BITS>
__device__ __forceinline__ void attend(State& state, const unsigned char* slot, const float2* factors,
                                       const uint4* q, int part, int left, const int* ids,
                                       const Queries& queries, float* mass) {
    constexpr int BLOCKS = BITS == 8 ? 1 : 2, WORDS = 2 * BLOCKS * BITS, M = 2 * BLOCKS;
    constexpr float HALF = ((1 << BITS) - 1) * 0.5f;
    const int lane = threadIdx.x % 32;
    const uint4* mine = reinterpret_cast<const uint4*>(slot) + lane;
    float scores[BLOCKS][QT][4] = {};
    {
        u32 keys[WORDS], words[QT][16];
        load_words(keys, mine);
#pragma unroll
        for (int n = 0; n < QT; ++n) load_queries(words[n], q, n);
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
            for (int t = 0; t < 8; ++t) {
                const u32 *low = keys + 2 * b * BITS, *high = low + BITS;
                const u32 a[4] = {pair_of<BITS>(low, 2 * t), pair_of<BITS>(high, 2 * t),
                                  pair_of<BITS>(low, 2 * t + 1), pair_of<BITS>(high, 2 * t + 1)};
#pragma unroll
                for (int n = 0; n < QT; ++n)
                    multiply_add_fp16(scores[b][n], a, words[n][2 * t], words[n][2 * t + 1]);
            }
    }
    const uint4 four = mine[SCALES_AT / 16];
    const u32 scales[4] = {BITS == 8 && part ? four.z : four.x, BITS == 8 && part ? four.w : four.y, four.z,
                           four.w};
    const int room = left - lane / 4;
    const Token tokens[4] = {{scales[0], room > 0},
                             {scales[1], room > 8},
                             {scales[2], BLOCKS == 2 && room > 16},
                             {scales[3], BLOCKS == 2 && room > 24}};
    int id[4] = {};
    if (CAUSAL && BITS == 8) {
        if (tokens[0].held) id[0] = ids[lane / 4];
        if (tokens[1].held) id[1] = ids[lane / 4 + 8];
    }
    weigh<M>(state, scores, factors, tokens, HALF, 1.0f, BITS == 8 ? id : nullptr, queries, mass);
    u32 values[WORDS];
    load_words(values, mine + VALUES_AT / 16);

#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        u32 weights[QT][2];
#pragma unroll
        for (int n = 0; n < QT; ++n) {
            weights[n][0] = transposed(pack_fp16(scores[b][n][0], scores[b][n][1]));
            weights[n][1] = transposed(pack_fp16(scores[b][n][2], scores[b][n][3]));
        }
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            const u32 *low = values + 2 * b * BITS, *high = low + BITS;
            const u32 a[4] = {pair_of<BITS>(low, 2 * t), pair_of<BITS>(low, 2 * t + 1),
                              pair_of<BITS>(high, 2 * t), pair_of<BITS>(high, 2 * t + 1)};
#pragma unroll
            for (int n = 0; n < QT; ++n) multiply_add_fp16(state.o[n][t], a, weights[n][0], weights[n][1]);
        }
    }
}

// A piece of 16 bits from a slot: half of each product is zeros, since few tokens are there.
__device__ __forceinline__ void attend_bf16(State& state, const unsigned char* slot, const float2* factors,
                                            const uint4* q, int part, int left, const int* ids,
                                            const Queries& queries, float* mass) {
    const int lane = threadIdx.x % 32;
    const uint4* mine = reinterpret_cast<const uint4*>(slot) + lane;
    float scores[1][QT][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const uint4 four = mine[j * 32];
        const u32 first[4] = {four.x, 0, four.y, 0}, second[4] = {four.z, 0, four.w, 0};
#pragma unroll
        for (int n = 0; n < QT; ++n) {
            const uint4 words = q[(n * 4 + j) * 32 + lane];
            multiply_add(scores[0][n], first, words.x, words.y);
            multiply_add(scores[0][n], second, words.z, words.w);
        }
    }
    const uint4 four = mine[SCALES_AT / 16];
    const Token token{part & 2 ? (part & 1 ? four.w : four.z) : (part & 1 ? four.y : four.x),
                      lane / 4 < left};
    int id = 0;
    if (CAUSAL && token.held) id = ids[lane / 4];
    weigh<1>(state, scores, factors, &token, 0.0f, power(-24), &id, queries, mass);
    // zero the values of no token: they may hold NaN, and 0 * NaN is NaN
    const u32 votes = __ballot_sync(~0u, token.held) >> lane % 4 * 8;
    const u32 held = (votes & 1 ? 0xffffu : 0u) | (votes & 16 ? 0xffff0000u : 0u);
    u32 weights[QT];
#pragma unroll
    for (int n = 0; n < QT; ++n) weights[n] = transposed(pack(scores[0][n][0], scores[0][n][1]));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const uint4 values = mine[VALUES_AT / 16 + j * 32];
        const u32 first[4] = {values.x & held, values.y & held, 0, 0};
        const u32 second[4] = {values.z & held, values.w & held, 0, 0};
#pragma unroll
        for (int n = 0; n < QT; ++n) {
            multiply_add(state.o[n][2 * j], first, weights[n], 0);
            multiply_add(state.o[n][2 * j + 1], second, weights[n], 0);
        }
    }
}
