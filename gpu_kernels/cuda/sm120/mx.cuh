// SPDX-License-Identifier: Apache-2.0
// Activations as MXFP8 (e4m3), or MXFP4 (e2m1) where PACKED is 1: 32 channels share a ue8m0 scale.
// ttnn_moe/formats/mxfp8.py, rule "up", and quantise_mxfp4.py, rule "ocp", give the same bytes.
#pragma once

#include "sm120/e4m3.cuh"

#ifndef PACKED
#define PACKED 0
#endif

using u8 = unsigned char;

constexpr int GROUP = 32;
constexpr u32 NAN_SCALE = 0xff;

// Bytes of a row of scales: a multiple of 4, padded with zeros.
__device__ __forceinline__ int scale_stride(int channels) { return (channels / GROUP + 3) / 4 * 4; }

// Bits that grow with the magnitude; those of NaN are the largest.
__device__ __forceinline__ u32 magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }

// The scale of channels whose largest magnitude has the bits `most`.
__device__ __forceinline__ u32 scale_of(u32 most) {
    constexpr int EXPONENT = PACKED ? 2 : 8;  // of the largest number
    const int exponent = most >> 23;
    if (exponent == 0xff) return NAN_SCALE;
    const int doubled = !PACKED && (most & 0x7fffffu) > 0x600000u;  // 448 is 1.75 * 2^8
    return min(max(exponent - EXPONENT + doubled, 0), 254 - EXPONENT);
}

// 1 / scale. NaN: 0.
__device__ __forceinline__ float inverse_of(u32 scale) {
    return scale == NAN_SCALE ? 0.0f : __uint_as_float((254 - scale) << 23);
}

// Four bits of a number: to nearest, ties to even; beyond 6: 6.
__device__ __forceinline__ u32 to_e2m1(float value) {
    const float a = __uint_as_float(magnitude(value));
    const u32 code =
        (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return code | (__float_as_uint(value) >> 28 & 8);
}
