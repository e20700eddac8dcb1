// SPDX-License-Identifier: Apache-2.0
// The instructions of atoms.cuh in exact arithmetic, with the same fragments: for tests on other machines.
//
// | operand of m16n8k32    | element    | lane               | where in the lane                              |
// |------------------------|------------|--------------------|------------------------------------------------|
// | A, e4m3 or e2m1        | row, k     | row % 8 * 4 + k / 4 % 4 | word row / 8 + k / 16 * 2, byte k % 4     |
// | B, e4m3 or e2m1        | k, column  | column * 4 + k / 4 % 4  | word k / 16, byte k % 4                   |
// | scale_A, thread-id 0   | row        | row % 8 * 4 + row / 8   | byte byte-id                              |
// | scale_B, thread-id 0   | column     | column * 4              | byte byte-id                              |
// | sums                   | row, column | row % 8 * 4 + column / 2 | row / 8 * 2 + column % 2                |
//
// m16n8k64 (e2m1 alone) has twice as many k a byte: its rows are the same bytes. Its scales of k 0 .. 31 and
// 32 .. 63 are the bytes byte-id and byte-id + 1. An e2m1 number of m16n8k32 is bits 5 .. 2 of a byte. Where
// the other bits are not 0, products here are NaN, so that a test sees it.
#pragma once

#include "sm120/lanes.cuh"

constexpr u32 NAN_BITS = 0x7fffffff;

__device__ __forceinline__ int with_sign(bool negative, int magnitude) {
    return negative ? -magnitude : magnitude;
}

// Units of 2^-9; not for NaN.
__device__ __forceinline__ int units_of_e4m3(u32 byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    return with_sign(byte & 0x80, exponent ? (8 + mantissa) << (exponent - 1) : mantissa);
}

// Units of 0.5.
__device__ __forceinline__ int units_of_e2m1(u32 code) {
    const int exponent = code >> 1 & 3, mantissa = code & 1;
    return with_sign(code & 8, exponent ? (2 + mantissa) << (exponent - 1) : mantissa);
}

__device__ __forceinline__ float scaled(int sum, int exponent, u32 scale_a, u32 scale_b) {
    if (scale_a == 0xff || scale_b == 0xff) return __uint_as_float(NAN_BITS);
    return ldexpf(static_cast<float>(sum), static_cast<int>(scale_a + scale_b) - 254 + exponent);
}

// See atoms.cuh.
__device__ __forceinline__ void load_fp4_matrices(u32 (&words)[4], u32 address) {
    const int lane = threadIdx.x % 32;
    const Lanes<1> lanes{{address}};
    lanes.bring();
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        const u32 four = load_two_bytes(lanes.of(8 * m + lane / 4, 0), lane % 4 * 2);
        words[m] = (four & 0xf) | (four & 0xf0) << 4 | (four & 0xf00) << 8 | (four & 0xf000) << 12;
    }
    lanes.leave();
}

// Of all products of a kernel one function: inlined, they take ptxas many minutes.
OUT_OF_LINE float4 software_product(Lanes<8> lanes, float4 given, int byte, bool fp4_a) {
    const int lane = threadIdx.x % 32;
    float sums[4] = {given.x, given.y, given.z, given.w};
    lanes.bring();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, column = lane % 4 * 2 + i % 2;
        int sum = 0;
        bool wrong = false;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const u32 of_a = lanes.of(row * 4 + n % 4, i / 2 + n / 4 * 2);
            const u32 of_b = lanes.of(column * 4 + n % 4, 4 + n / 4);
            const u32 fp8 = fp4_a ? of_b : of_a, fp4 = fp4_a ? of_a : of_b;
            wrong |= (fp4 & 0xc3c3c3c3u) != 0;
#pragma unroll
            for (int bit = 0; bit < 32; bit += 8) {
                wrong |= (fp8 >> bit & 0x7f) == 0x7f;
                sum += units_of_e4m3(fp8 >> bit & 0xff) * units_of_e2m1(fp4 >> (bit + 2) & 15);
            }
        }
        const u32 of_row = lanes.of(row * 4 + i / 2, 6) >> 8 * byte & 0xff;
        const u32 of_column = lanes.of(column * 4, 7) >> 8 * byte & 0xff;
        sums[i] += wrong ? __uint_as_float(NAN_BITS) : scaled(sum, -10, of_row, of_column);
    }
    lanes.leave();
    return make_float4(sums[0], sums[1], sums[2], sums[3]);
}

OUT_OF_LINE float4 software_product_fp4(Lanes<8> lanes, float4 given, int byte) {
    const int lane = threadIdx.x % 32;
    float sums[4] = {given.x, given.y, given.z, given.w};
    lanes.bring();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, column = lane % 4 * 2 + i % 2;
        const u32 of_row = lanes.of(row * 4 + i / 2, 6) >> 8 * byte;
        const u32 of_column = lanes.of(column * 4, 7) >> 8 * byte;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int sum = 0;
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const u32 of_a = lanes.of(row * 4 + n, i / 2 + half * 2);
                const u32 of_b = lanes.of(column * 4 + n, 4 + half);
#pragma unroll
                for (int bit = 0; bit < 32; bit += 4)
                    sum += units_of_e2m1(of_a >> bit & 15) * units_of_e2m1(of_b >> bit & 15);
            }
            sums[i] += scaled(sum, -2, of_row >> 8 * half & 0xff, of_column >> 8 * half & 0xff);
        }
    }
    lanes.leave();
    return make_float4(sums[0], sums[1], sums[2], sums[3]);
}

__device__ __forceinline__ void set_sums(float (&sums)[4], float4 made) {
    sums[0] = made.x, sums[1] = made.y, sums[2] = made.z, sums[3] = made.w;
}

template <bool FP4_A, int BYTE>
__device__ __forceinline__ void multiply_scaled(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                u32 scale_a, u32 scale_b) {
    const Lanes<8> lanes{{a[0], a[1], a[2], a[3], b0, b1, scale_a, scale_b}};
    set_sums(sums, software_product(lanes, make_float4(sums[0], sums[1], sums[2], sums[3]), BYTE, FP4_A));
}

template <int BYTE>
__device__ __forceinline__ void multiply_scaled_fp4(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                    u32 scale_a, u32 scale_b) {
    const Lanes<8> lanes{{a[0], a[1], a[2], a[3], b0, b1, scale_a, scale_b}};
    set_sums(sums, software_product_fp4(lanes, make_float4(sums[0], sums[1], sums[2], sums[3]), BYTE));
}
