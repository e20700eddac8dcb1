// SPDX-License-Identifier: Apache-2.0
// Operands and products of a warp of mxfp4_product, from a stage of shared memory.
#pragma once
#include "sm120/atoms.cuh"
#include "sm120/product_loads.cuh"

using Sums = float[MS][NS][4];

// Operands of a warp, from a stage.
struct Fragments {
    int row, column;        // the first of this warp
    u32 shifts = 0, lanes;  // bits between a word and the scales of this lane's weight rows: 2 of each

    __device__ __forceinline__ Fragments() : lanes(threadIdx.x % 32) {
        const int warp = threadIdx.x / 32;
        row = warp % WARPS_M * WARP_ROWS;
        column = warp / WARPS_M * WARP_COLUMNS;
    }
    // Row of the A side, column of the B side, whose scales this lane brings.
    __device__ __forceinline__ int scaled_row(int m) const {
        return row + m * 16 + lanes / 4 + lanes % 2 * 8;
    }
    __device__ __forceinline__ int scaled_column(int n) const { return column + n * 8 + lanes / 4; }

    __device__ __forceinline__ void start(const Matrices& given, int block) {
        shifts = 0;
#pragma unroll
        for (int i = 0; i < (SWAPPED ? MS : NS); ++i) {
            const int r = given.weight_row(block, SWAPPED ? scaled_row(i) : scaled_column(i));
            shifts |= (r * (given.channels / GROUP) & 3) << 2 * i;
        }
    }
    static __device__ __forceinline__ u32 word(int at) {
        return *reinterpret_cast<const u32*>(dynamic_memory() + at);
    }
    static __device__ __forceinline__ u32 x_scales(int stage, int r) {
        return word(stage + X_SCALES + 4 * r);
    }
    // i: of the warp's fragments on that side.
    __device__ __forceinline__ u32 w_scales(int stage, int r, int i) const {
        const int at = stage + W_SCALES + 8 * r;
        return __funnelshift_r(word(at), word(at + 4), (shifts >> 2 * i & 3) * 8);
    }
    __device__ __forceinline__ u32 row_scales(int stage, int m) const {
        return SWAPPED ? w_scales(stage, scaled_row(m), m) : x_scales(stage, scaled_row(m));
    }
    __device__ __forceinline__ u32 column_scales(int stage, int n) const {
        return SWAPPED ? x_scales(stage, scaled_column(n)) : w_scales(stage, scaled_column(n), n);
    }

    template <bool OF_WEIGHTS>
    static __device__ __forceinline__ void load(u32 (&words)[4], u32 side, int r, int chunk) {
        const u32 address = side + (OF_WEIGHTS ? WEIGHTS : 0) + place(r, chunk);
        if constexpr (OF_WEIGHTS && !PACKED) {
            load_fp4_matrices(words, address);
#pragma unroll
            for (u32& word : words) word <<= 2;  // products take bits 5 .. 2 of a byte
        } else {
            load_matrices(words, address);
        }
    }
    // Rows 0 .. 7 and 8 .. 15 of the first half of k, then of the second.
    __device__ __forceinline__ void load_rows(u32 (&a)[4], u32 stage, int m, int k) const {
        load<SWAPPED>(a, stage, row + m * 16 + lanes % 16, 2 * k + lanes / 16);
    }
    // Both halves of k of columns 0 .. 7, then of 8 .. 15; of one fragment: of k, then of k + 1.
    __device__ __forceinline__ void load_columns(u32 (&b)[4], u32 stage, int n, int k) const {
        const int next = NS > 1 ? lanes / 16 * 8 : 0, chunk = NS > 1 ? lanes / 8 % 2 : lanes / 8;
        load<!SWAPPED>(b, stage, column + n * 8 + next + lanes % 8, 2 * k + chunk);
    }
};

template <int K>
__device__ __forceinline__ void product(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 scale_a,
                                        u32 scale_b) {
    if constexpr (PACKED)
        multiply_scaled_fp4<2 * K>(sums, a, b0, b1, scale_a, scale_b);
    else
        multiply_scaled<SWAPPED, K>(sums, a, b0, b1, scale_a, scale_b);
}

template <int K = 0>
__device__ __forceinline__ void multiply(Sums& sums, const Fragments& of, u32 shared, int stage,
                                         const u32 (&row_scales)[MS], const u32 (&column_scales)[NS],
                                         u32 (&b)[(NS + 1) / 2][4]) {
    if constexpr (K < STEPS) {
        u32 a[MS][4];
#pragma unroll
        for (int m = 0; m < MS; ++m) of.load_rows(a[m], shared + stage, m, K);
#pragma unroll
        for (int n = 0; n < NS; n += 2)
            if (NS > 1 || K % 2 == 0) of.load_columns(b[n / 2], shared + stage, n, K);
#pragma unroll
        for (int n = 0; n < NS; ++n) {
            constexpr int ODD = NS > 1 ? 0 : K % 2;
            const u32(&words)[4] = b[n / 2];
            const int at = 2 * (n % 2 + ODD);
#pragma unroll
            for (int m = 0; m < MS; ++m)
                product<K>(sums[m][n], a[m], words[at], words[at + 1], row_scales[m], column_scales[n]);
        }
        multiply<K + 1>(sums, of, shared, stage, row_scales, column_scales, b);
    }
}
