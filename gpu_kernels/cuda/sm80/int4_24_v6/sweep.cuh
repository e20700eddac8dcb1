// One phase: a sweep over all channels with P=1 stage / exec. PATHS: 2 (gate, up) or 1 (main).
#pragma once

#include "sm80/int4_24_v6/stage.cuh"

template <int PATHS>
struct Slot {
    StageOut out[PATHS];
    u32 e[PATHS][2];  // of this lane, by half
};

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
    const auto park_h0 = [&] {
#pragma unroll
        for (int path = 0; path < PATHS; ++path) next.e[path][0] = park<0>(next.out[path], at);
    };
    const auto park_h1 = [&] {
#pragma unroll
        for (int path = 0; path < PATHS; ++path) next.e[path][1] = park<1>(next.out[path], at);
    };

#pragma unroll
    for (int g2 = 0; g2 < AHEAD; ++g2) {
#pragma unroll
        for (int path = 0; path < PATHS; ++path) raw[g2][path] = make_uint4(0, 0, 0, 0);
        load(raw[g2], g2);
    }
    stage_next(raw[0]);
    load(raw[0], AHEAD);
    park_h0();
    park_h1();
    u32 slab = Xsh + at.lane * KROW_BYTES;
    for (int first = 0; first < G2; first += AHEAD) {
#pragma unroll
        for (int step = 0; step < AHEAD; ++step) {
            const int g2 = first + step;
            if (g2 >= G2) break;
            cur = next;
            u32 b[4];
            float d[PATHS][4];
            // half 0: lanes t 0 and t 1 hold e; stage(next) meanwhile
            load_transposed(b, slab);
            products<0>(d, cur, b);
            stage_next(raw[(step + 1) % AHEAD]);  // of zeros after the last step
            load(raw[(step + 1) % AHEAD], g2 + 1 + AHEAD);
            accumulate<0>(c, d, cur);
            park_h0();  // t 0 and t 1 are free
            // half 1: lanes t 2 and t 3 hold e
            load_transposed(b, slab + KTILE * KROW_BYTES);
            products<1>(d, cur, b);
            accumulate<1>(c, d, cur);
            park_h1();  // t 2 and t 3 are free
            slab += 2 * KTILE * KROW_BYTES;
        }
    }
}
