// SPDX-License-Identifier: Apache-2.0
// One phase: a sweep over all channels with P=1 stage / exec. PATHS: 2 (gate, up) or 1 (main).
#pragma once

#include "sm80/int4_24_v6/stage.cuh"

// Words of a path: where this lane's row begins; R rows later the next 64 channels follow.
struct Path {
    const uint4* words;
};

// Pairs of bf16 integers of an int8x4: A of chunk t, then of chunk t + 4.
__device__ __forceinline__ void widen(u32& low, u32& high, u32 bytes) {
    const u32 biased = and_xor(bytes, 0x0f0f0f0fu, 0x08080808u);  // s + 8
    low = integers_of(__byte_perm(biased, 0x43434343u, 0x4140));
    high = integers_of(__byte_perm(biased, 0x43434343u, 0x4342));
}

// d of one half: integers times X, unscaled. b: of the half's 32 channels, shared by the paths.
template <int HALF, int PATHS>
__device__ __forceinline__ void products(float (&d)[PATHS][4], const Slot<PATHS>& cur, const u32 (&b)[4]) {
#pragma unroll
    for (int path = 0; path < PATHS; ++path) {
        const StageOut& out = cur.out[path];
        u32 a[4];
        widen(a[0], a[2], HALF ? out.top_h1 : out.top_h0);
        widen(a[1], a[3], HALF ? out.bot_h1 : out.bot_h0);
#pragma unroll
        for (int i = 0; i < 4; ++i) d[path][i] = 0.0f;
        multiply_sparse<HALF>(d[path], a, b, cur.e[path][HALF]);
    }
}

// AS: the scale is applied after the product, in fp32.
template <int HALF, int PATHS>
__device__ __forceinline__ void accumulate(float (&c)[PATHS][4], const float (&d)[PATHS][4],
                                           const Slot<PATHS>& cur) {
#pragma unroll
    for (int path = 0; path < PATHS; ++path) {
        const u32 scales = static_cast<u32>(cur.out[path].sc_pack >> 32 * HALF);
        const float scale_top = scale_of(scales << 16), scale_bot = scale_of(scales);
#pragma unroll
        for (int i = 0; i < 4; ++i) c[path][i] = fmaf(d[path][i], i < 2 ? scale_top : scale_bot, c[path][i]);
    }
}

// c += the products of all 64 * G2 channels. Xsh: address in shared memory. R: words from 64 channels to the
// next.
template <int PATHS>
__device__ __forceinline__ void sweep(float (&c)[PATHS][4], const Path (&paths)[PATHS], u32 Xsh, int G2,
                                      u64 R, const Lane& at) {
    constexpr int AHEAD = WORDS_AHEAD;
    uint4 raw[AHEAD][PATHS];  // words of step g2 in raw[g2 % AHEAD]; of the lanes that load
    const auto load = [&](uint4(&to)[PATHS], int g2) {
#pragma unroll
        for (int path = 0; path < PATHS; ++path)
            if (at.t >= SRC_T && g2 < G2) to[path] = load_once(paths[path].words + g2 * R);
    };
    Slot<PATHS> cur, next;
    const auto stage_next = [&](const uint4(&words)[PATHS]) {
#pragma unroll
        for (int path = 0; path < PATHS; ++path) next.out[path] = stage(words[path], at);
    };
#pragma unroll
    for (int g2 = 0; g2 < AHEAD; ++g2) {
#pragma unroll
        for (int path = 0; path < PATHS; ++path) raw[g2][path] = make_uint4(0, 0, 0, 0);
        load(raw[g2], g2);
    }
    stage_next(raw[0]);
    load(raw[0], AHEAD);
    park<0>(next, at);
    park<1>(next, at);
    u32 slab = Xsh + at.lane * KROW_BYTES;
    u32 b[2][4];  // of half 0 and half 1
    load_transposed(b[0], slab);
    for (int first = 0; first < G2; first += AHEAD) {
#pragma unroll
        for (int step = 0; step < AHEAD; ++step) {
            const int g2 = first + step;
            if (g2 >= G2) break;
            cur = next;
            float d[PATHS][4];
            // half 0: lanes t 0 and t 1 hold e; stage(next) meanwhile
            products<0>(d, cur, b[0]);
            load_transposed(b[1], slab + KTILE * KROW_BYTES);
            stage_next(raw[(step + 1) % AHEAD]);  // of any words after the last step
            load(raw[(step + 1) % AHEAD], g2 + 1 + AHEAD);
            accumulate<0>(c, d, cur);
            park<0>(next, at);  // t 0 and t 1 are free
            // half 1: lanes t 2 and t 3 hold e
            products<1>(d, cur, b[1]);
            const u32 after = slab + (g2 + 1 < G2 ? 2 * KTILE * KROW_BYTES : 0);  // any, after the last step
            load_transposed(b[0], after);
            accumulate<1>(c, d, cur);
            park<1>(next, at);  // t 2 and t 3 are free
            slab = after;
        }
    }
}
