// SPDX-License-Identifier: Apache-2.0
// Levels of a tier (ttnn_moe/kv/bucketed/packing.py) as operands of products: a lane's words of 16 tokens by
// 128 channels to pairs of fp16. A pair is a denormal number: level * 2^(shift_of - 24), exactly.
#pragma once

#include "common/element.cuh"

// 3 bits: how far word `word` is shifted for its last two pairs. Bit 15 of the words then lies at 6, 7 and 8.
__device__ __forceinline__ constexpr int down_of(int word) { return 9 - word; }

// Channels 8 * c .. 8 * c + 7 lie at this bit of a half word when a pair is taken.
template <int BITS>
__device__ __forceinline__ constexpr int shift_of(int c) {
    return BITS == 2   ? c % 4 * 2
           : BITS == 3 ? (c == 15 ? 6 : c % 5 * 3 - (c % 5 < 3 ? 0 : down_of(c / 5)))
           : BITS == 4 ? c % 2 * 4
                       : 0;
}

// Pair c of 16: one AND; a shift serves two to four pairs, and its share of pair 15 of 3 bits. words: BITS of
// them, of one half of the tokens.
template <int BITS>
__device__ __forceinline__ u32 pair_of(const u32* words, int c) {
    if (BITS == 2) {
        const u32 word = words[c / 8];
        return (c % 8 < 4 ? word : word >> 8) & 0x00030003u << shift_of<2>(c);
    }
    if (BITS == 3) {
        if (c == 15)
            return (words[0] >> down_of(0) & 0x00400040u) | (words[1] >> down_of(1) & 0x00800080u) |
                   (words[2] >> down_of(2) & 0x01000100u);
        const u32 word = words[c / 5];
        return (c % 5 < 3 ? word : word >> down_of(c / 5)) & 0x00070007u << shift_of<3>(c);
    }
    if (BITS == 4) {
        const u32 word = words[c / 4];
        return (c % 4 < 2 ? word : word >> 8) & 0x000f000fu << shift_of<4>(c);
    }
    return __byte_perm(words[c / 2], 0, c % 2 ? 0x4341 : 0x4240);
}

// 2^n, for n from -126 to 127.
__device__ __forceinline__ constexpr u32 bits_of_power(int n) { return static_cast<u32>(127 + n) << 23; }
