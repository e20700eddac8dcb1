// SPDX-License-Identifier: Apache-2.0
// stage and park: from words of two rows to what exec multiplies. A group of four lanes shares the rows
// row_top and row_bot of its warp's 16; all shuffles stay within it. A step is 64 channels: half 0 and half
// 1, a word a row each.
#pragma once

#include "sm80/int4_24_v6/shape.cuh"

constexpr int SRC_T = 2;  // lane SRC_T of a group loads row_top, the next row_bot: free lanes of half 0

// What a lane t has of one step of one path (gate, up or main).
struct StageOut {
    u32 top_h0, bot_h0, top_h1, bot_h1;  // int8x4: the kept pair of chunk t, then of chunk t + 4
    u64 sc_pack;                         // bf16 bits: top half 0, bot half 0, top half 1, bot half 1
    u32 nib_h0, nib_h1;  // bytes: nib_lo of chunk t, nib_hi of t + 4; each top_nib | bot_nib << 4
};

// int8x4 of chunks t and t + 4: (s, 0) where the slot is 0, else (0, s). index: idx2 of t at bit 0, of t + 4
// at 8.
__device__ __forceinline__ u32 phantom_pairs(u32 values, u32 index, int t) {
    const u32 s = (values >> 4 * t & 0x000f000fu) + 0x00f800f8u;  // q4 - 8, in bytes 0 and 2
    // bytes 0 4 2 6 of (s, 0), where a slot is 1 the other way round
    return choose_bytes(s, 0x6240 - 0x3c * (index & 0x0101u));
}

// Nibble tokens of chunks t (low byte) and t + 4.
__device__ __forceinline__ u32 nibbles(u32 index_top, u32 index_bot) {
    constexpr u32 STEP = (IDX_23 - IDX_01) / 2;  // pair is bit 1
    return (index_bot & 0x0202u) * (STEP << 4) + ((index_top & 0x0202u) * STEP + IDX_01 * 0x1111u);
}

__device__ __forceinline__ uint4 from_lane(uint4 words, int lane) {
    return make_uint4(__shfl_sync(~0u, words.x, lane), __shfl_sync(~0u, words.y, lane),
                      __shfl_sync(~0u, words.z, lane), __shfl_sync(~0u, words.w, lane));
}

// words: both halves of a row, as the lanes SRC_T and SRC_T + 1 loaded them.
__device__ __forceinline__ StageOut stage(uint4 words, const Lane& at) {
    const int src_lane_top = (at.group << 2) + SRC_T, src_lane_bot = (at.group << 2) + SRC_T + 1;
    const uint4 top = from_lane(words, src_lane_top), bot = from_lane(words, src_lane_bot);
    const u32 top_i0 = top.y >> 2 * at.t, bot_i0 = bot.y >> 2 * at.t;
    const u32 top_i1 = top.w >> 2 * at.t, bot_i1 = bot.w >> 2 * at.t;
    StageOut out;
    out.top_h0 = phantom_pairs(top.x, top_i0, at.t);
    out.bot_h0 = phantom_pairs(bot.x, bot_i0, at.t);
    out.top_h1 = phantom_pairs(top.z, top_i1, at.t);
    out.bot_h1 = phantom_pairs(bot.z, bot_i1, at.t);
    const u32 scales_h0 = __byte_perm(top.y, bot.y, 0x7632), scales_h1 = __byte_perm(top.w, bot.w, 0x7632);
    out.sc_pack = scales_h0 | static_cast<u64>(scales_h1) << 32;
    out.nib_h0 = nibbles(top_i0, bot_i0);
    out.nib_h1 = nibbles(top_i1, bot_i1);
    return out;
}

template <int PATHS>
struct Slot {
    StageOut out[PATHS];
    u32 e[PATHS][2];  // of this lane, by half
};

// e of this lane for one half, of all paths. half 0 (f = 0): t 0 holds chunks 0 .. 3, t 1 chunks 4 .. 7; half
// 1 (f = 1): t 2 and t 3. In the low 16 bits of row_top, in the high ones of row_bot. The other lanes hold 0.
template <int HALF, int PATHS>
__device__ __forceinline__ void park(Slot<PATHS>& slot, const Lane& at) {
    u32 here[PATHS], there[PATHS];
    // nib_lo of the lanes for an even t, nib_hi for an odd one: each byte top_nib | bot_nib << 4
#pragma unroll
    for (int path = 0; path < PATHS; ++path) {
        const u32 own = HALF ? slot.out[path].nib_h1 : slot.out[path].nib_h0;
        const u32 beside = __shfl_xor_sync(~0u, own, 1);
        here[path] = __byte_perm(own, beside, at.t & 1 ? 0x4415 : 0x4440);  // of this lane's two, by t
    }
#pragma unroll
    for (int path = 0; path < PATHS; ++path) there[path] = __shfl_xor_sync(~0u, here[path], 2);
#pragma unroll
    for (int path = 0; path < PATHS; ++path) {
        // bytes of t 0, 2, 1, 3; then nibbles 1 and 4 trade, and 3 and 6: top of t 0 .. 3, bot of t 0 .. 3
        const u32 bytes = __byte_perm(here[path], there[path], at.t & 2 ? 0x1504 : 0x5140);
        u32 e = (bytes & 0xffff0f0fu) | (bytes >> 12 & 0x0000f0f0u);
        e = (e & 0xf0f0ffffu) | (bytes << 12 & 0x0f0f0000u);
        slot.e[path][HALF] = at.t >> 1 == HALF ? e : 0;
    }
}
