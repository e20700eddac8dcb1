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

// int8x4 of chunks t and t + 4: (s, 0) where the slot is 0, else (0, s).
__device__ __forceinline__ u32 phantom_pairs(Word word, int t) {
    const u32 s = ((word.values >> 4 * t & 0x000f000fu) + 0x00f800f8u) & 0x00ff00ffu;  // q4 - 8, a byte each
    const u32 slots = word.rest >> 2 * t & 0x0101u;
    return choose_bytes(s, 0x3210 ^ slots * 0x11);
}

// Nibble tokens of chunks t (low byte) and t + 4.
__device__ __forceinline__ u32 nibbles(u32 rest_top, u32 rest_bot, int t) {
    const u32 pairs = (rest_top >> (2 * t + 1) & 0x0101u) | (rest_bot >> (2 * t + 1) & 0x0101u) << 4;
    return IDX_01 * 0x1111u + (IDX_23 - IDX_01) * pairs;
}

__device__ __forceinline__ uint4 from_lane(uint4 words, int lane) {
    return make_uint4(__shfl_sync(~0u, words.x, lane), __shfl_sync(~0u, words.y, lane),
                      __shfl_sync(~0u, words.z, lane), __shfl_sync(~0u, words.w, lane));
}

// words: both halves of a row, as the lanes SRC_T and SRC_T + 1 loaded them.
__device__ __forceinline__ StageOut stage(uint4 words, const Lane& at) {
    const int src_lane_top = (at.group << 2) + SRC_T, src_lane_bot = (at.group << 2) + SRC_T + 1;
    const uint4 top = from_lane(words, src_lane_top), bot = from_lane(words, src_lane_bot);
    StageOut out;
    out.top_h0 = phantom_pairs({top.x, top.y}, at.t);
    out.bot_h0 = phantom_pairs({bot.x, bot.y}, at.t);
    out.top_h1 = phantom_pairs({top.z, top.w}, at.t);
    out.bot_h1 = phantom_pairs({bot.z, bot.w}, at.t);
    const u32 scales_h0 = __byte_perm(top.y, bot.y, 0x7632), scales_h1 = __byte_perm(top.w, bot.w, 0x7632);
    out.sc_pack = scales_h0 | static_cast<u64>(scales_h1) << 32;
    out.nib_h0 = nibbles(top.y, bot.y, at.t);
    out.nib_h1 = nibbles(top.w, bot.w, at.t);
    return out;
}

// e of this lane for one half. half 0 (f = 0): t 0 holds chunks 0 .. 3, t 1 chunks 4 .. 7; half 1 (f = 1): t
// 2 and t 3. In the low 16 bits of row_top, in the high ones of row_bot. The other lanes hold 0.
template <int HALF>
__device__ __forceinline__ u32 park(const StageOut& out, const Lane& at) {
    const u32 own = HALF ? out.nib_h1 : out.nib_h0;
    const u32 beside = __shfl_xor_sync(~0u, own, 1);
    const u32 here = at.t & 1 ? beside | own << 16 : own | beside << 16;  // of this lane's two, by t
    const u32 there = __shfl_xor_sync(~0u, here, 2);
    const u32 first = at.t & 2 ? there : here, last = at.t & 2 ? here : there;
    // nib_lo of four lanes for the even t, nib_hi for the odd: each byte top_nib | bot_nib << 4
    u32 e = __byte_perm(first, last, at.t & 1 ? 0x7531 : 0x6420);
    e = (e & 0xf00ff00fu) | (e >> 4 & 0x00f000f0u) |
        (e & 0x00f000f0u) << 4;     // nibbles 1 and 2 of 16 bits trade
    e = __byte_perm(e, 0, 0x3120);  // so do bytes 1 and 2
    return at.t >> 1 == HALF ? e : 0;
}
