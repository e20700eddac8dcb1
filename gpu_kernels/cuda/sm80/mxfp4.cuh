// SPDX-License-Identifier: Apache-2.0
// MXFP4 weights (ttnn_moe/formats/mxfp4.py) as A of mma.m16n8k16, decoded by the lanes that hold them.
//
// The order of k in a product is free if A and B agree. A chunk is 128 channels, four groups of 32: group t
// belongs to lane t of a quad, 16 bytes of a row. So a lane needs one scale of a row and chunk. Word i of the
// 16 bytes feeds two products: channels 8i + j and 8i + j + 4 are a pair, pairs 0 and 1 are k of the first
// product, pairs 2 and 3 of the second.
//
// An e2m1 number's low three bits, at bits 6 .. 8 of a bf16, are the number times 2^-126, zero and subnormal
// included. A multiplication by 2^126 times the scale makes the weight, exactly: one fma of bf16 for two
// weights. bf16 has no 2^128, so scales of 2^2 and more take a second multiplication, in code of its own.
#pragma once

#include "sm80/bytes.cuh"
#include "sm80/mma.cuh"
#include "sm80/sparse.cuh"

#if FP16
#error "MXFP4 weights are multiplied as bf16"
#endif

constexpr int CHUNK = 128;  // channels

// Bits 6 .. 8 of each half of `bits`, all others of `signs`.
__device__ __forceinline__ u32 with_sign(u32 bits, u32 signs) {
    return select_bits(bits, signs, 0x01c001c0u);
}

// 2^126 times a scale, twice. A scale that says `large` is a part here; the rest is in `again`.
struct Factor {
    u32 factor, again;

    template <bool LARGE>
    __device__ __forceinline__ static Factor of(u32 scale) {
        if (!LARGE) return {scale * 0x00800080u + 0x3f003f00u, 0};
        const u32 rest = max(scale, 128u) - 1;
        return {min(scale, 128u) * 0x00800080u + 0x3f003f00u,
                scale == 255 ? 0x7fc07fc0u : rest * 0x00800080u};
    }
};

// Whether one of four scales is.
__device__ __forceinline__ bool is_large(u32 scales) { return (scales & 0x80808080u) != 0; }

// Pairs 0 .. 3 of a word, times 2^-126.
__device__ __forceinline__ void place(u32 (&pairs)[4], u32 word) {
    // by asm: the compiler would mask each pair's signs alone
    const u32 even = word << 4, odd_signs = and_xor(word, 0x80808080u, 0);
    const u32 even_signs = and_xor(even, 0x80808080u, 0);
    pairs[0] = with_sign(word << 6, even_signs << 8);
    pairs[1] = with_sign(word << 2, odd_signs << 8);
    pairs[2] = with_sign(even >> 6, even_signs);
    pairs[3] = with_sign(word >> 6, odd_signs);
}

// The same of neighbours: pair i has channels 2 i and 2 i + 1.
__device__ __forceinline__ void place_neighbours(u32 (&pairs)[4], u32 word) {
    const u32 odd = word >> 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        // of both halves: numbers 4 i and 4 i + 1 in the low bits, the next two eight bits above
        const u32 four = __byte_perm(word, odd, i ? 0x7632 : 0x5410);
        // one multiplication shifts a sign to bit 15 and the other three bits to bits 8 .. 6
        pairs[2 * i] = (four & 0x000f000fu) * 0x1040u & 0x81c081c0u;
        pairs[2 * i + 1] = (four >> 2 & 0x03c003c0u) * 0x41u & 0x81c081c0u;
    }
}

template <bool LARGE>
__device__ __forceinline__ void scale_pairs(u32 (&pairs)[4], const Factor& by) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = multiply_add_bf16x2(pairs[i], by.factor, 0x80008000u);
    if (LARGE)
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = multiply_add_bf16x2(pairs[i], by.again, 0x80008000u);
}

// Pairs 0 .. 3 of a word, times their scale.
template <bool LARGE>
__device__ __forceinline__ void decode(u32 (&pairs)[4], u32 word, const Factor& by) {
    place(pairs, word);
    scale_pairs<LARGE>(pairs, by);
}

// Eight channels in their order -> the words of B of both products of a word.
__device__ __forceinline__ uint4 pairs_of(uint4 x) {
    return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                      __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632));
}

__device__ __forceinline__ u32 word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// sums += rows lane / 4 (low) and lane / 4 + 8 (high) of word i, by G groups of eight columns.
template <bool LARGE, int G>
__device__ __forceinline__ void multiply_word(float (*sums)[4], u32 low, u32 high, const Factor& by_low,
                                              const Factor& by_high, const uint4* b) {
    u32 l[4], h[4];
    decode<LARGE>(l, low, by_low);
    decode<LARGE>(h, high, by_high);
    const u32 first[4] = {l[0], h[0], l[1], h[1]}, second[4] = {l[2], h[2], l[3], h[3]};
#pragma unroll
    for (int j = 0; j < G; ++j) multiply_add(sums[j], first, b[j].x, b[j].y);
#pragma unroll
    for (int j = 0; j < G; ++j) multiply_add(sums[j], second, b[j].z, b[j].w);
}
