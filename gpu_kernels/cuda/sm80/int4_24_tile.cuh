// SPDX-License-Identifier: Apache-2.0
// A warp's products of 64 rows of int4_24 words and the rows of a tile, and where both lie in shared memory.
#pragma once

#include "sm80/int4_24_rows.cuh"
#include "sm80/rows_out.cuh"

struct Weights {
    const uint4 *w13, *w2;
    int row_step, up_rows, H, I;
};

// Row c of 32 low, or of 32 high, ones is row g of that half of product m of a warp. Four transposed products
// give a lane eight channels in a row of memory: of out in their order, of act in the order of B. Swizzled:
// copies of eight rows in a row touch every bank once, as products do.
__device__ __forceinline__ u32 place(int c, int high, bool is_down) {
    const int word = is_down ? c / 2 : word_of(c), m = word % 4, g = word / 4 * 2 + c % 2;
    return ((2 * m + high) * 8 + (g ^ 2 * (m ^ high))) * 16;
}

// Of a 16-byte chunk of a row of a tile: two rows of four chunks touch every bank once.
__device__ __forceinline__ u32 place_of_row(int row, int chunk) {
    return row * 128 + (chunk ^ row % 2 * 4) * 16;
}

template <int G, int PRODUCTS = 4>
using Sums = float[PRODUCTS][G][4];

template <int G, int PRODUCTS>
__device__ __forceinline__ void clear(float (&sums)[PRODUCTS][G][4]) {
#pragma unroll
    for (int m = 0; m < PRODUCTS; ++m)
#pragma unroll
        for (int j = 0; j < G; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][j][i] = 0.0f;
}

// Where a lane reads a slab.
struct Lane {
    u32 word;  // of the low row of product 0, of this lane's row
    u32 row;   // of the first group: the first 32 channels of row lane / 4

    // warp_m: 64 weight rows each. first: row of the tile, a multiple of 8.
    __device__ __forceinline__ Lane(int warp_m, int first) {
        const int lane = threadIdx.x % 32;
        word = warp_m * 1024 + lane / 4 * 16;
        row = first * 128 + place_of_row(lane / 4, lane % 4);
    }
    // The words of 64 channels, or the half-th of them, of a row of product m.
    template <class T>
    __device__ __forceinline__ T words(const unsigned char* slab, int m, int high, int half) const {
        const u32 swizzle = 2 * (m ^ high) * 16;
        return *reinterpret_cast<const T*>(slab + ((word ^ swizzle) + (2 * m + high) * 128 + half * 8));
    }
    // B of group j.
    __device__ __forceinline__ void rows(u32 (&b)[4], const unsigned char* slab, int j, int half) const {
        const uint4 words = *reinterpret_cast<const uint4*>(slab + ((row ^ half * 64) + j * 1024));
        b[0] = words.x;
        b[1] = words.y;
        b[2] = words.z;
        b[3] = words.w;
    }
};

template <int G>
__device__ __forceinline__ void multiply_slab(Sums<G>& sums, const unsigned char* words,
                                              const unsigned char* rows, const Lane& lane,
                                              const Decoder& decoder) {
    if constexpr (G <= 2) {
        u32 b[2][G][4];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < G; ++j) lane.rows(b[half][j], rows, j, half);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const uint4 low = lane.words<uint4>(words, m, 0, 0), high = lane.words<uint4>(words, m, 1, 0);
            const auto first = decoder.decode(low.x, low.y, high.x, high.y);
#pragma unroll
            for (int j = 0; j < G; ++j) multiply_scaled(sums[m][j], first, b[0][j]);
            const auto second = decoder.decode(low.z, low.w, high.z, high.w);
#pragma unroll
            for (int j = 0; j < G; ++j) multiply_scaled(sums[m][j], second, b[1][j]);
        }
    } else if constexpr (G <= 4) {
#pragma unroll 1  // both at once would spill
        for (int half = 0; half < 2; ++half) {
            u32 b[G][4];
#pragma unroll
            for (int j = 0; j < G; ++j) lane.rows(b[j], rows, j, half);
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const uint2 low = lane.words<uint2>(words, m, 0, half),
                            high = lane.words<uint2>(words, m, 1, half);
                const auto decoded = decoder.decode(low.x, low.y, high.x, high.y);
                float products[G][4];
#pragma unroll
                for (int j = 0; j < G; ++j) multiply_integers(products[j], decoded, b[j]);
#pragma unroll
                for (int j = 0; j < G; ++j) scale(sums[m][j], products[j], decoded.low, decoded.high);
            }
        }
    } else {
#pragma unroll 1  // both at once would spill
        for (int half = 0; half < 2; ++half) {
            Decoder::Fragment decoded[4];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const uint2 low = lane.words<uint2>(words, m, 0, half),
                            high = lane.words<uint2>(words, m, 1, half);
                decoded[m] = decoder.decode(low.x, low.y, high.x, high.y);
            }
            // scaled a group later: products take a while
            float products[2][4][4];
#pragma unroll
            for (int j = 0; j <= G; ++j) {
                if (j < G) {
                    u32 b[4];
                    lane.rows(b, rows, j, half);
#pragma unroll
                    for (int m = 0; m < 4; ++m) multiply_integers(products[j % 2][m], decoded[m], b);
                }
                if (j > 0)
#pragma unroll
                    for (int m = 0; m < 4; ++m)
                        scale(sums[m][j - 1], products[(j - 1) % 2][m], decoded[m].low, decoded[m].high);
            }
        }
    }
}
