// SPDX-License-Identifier: Apache-2.0
// Rows of bf16 in fp16: a power of two takes the largest magnitude of a row to 2^14 .. 2^15. What is 2^31
// times smaller loses bits.
#pragma once

#include "sm80/halves.cuh"

// The power of two of a row of bf16.
struct RowPower {
    float up, down;  // down: 1 / up

    // most: the largest magnitude, as the bits of an fp32
    __device__ __forceinline__ explicit RowPower(u32 most) {
        const int exponent = max(static_cast<int>(most >> 23), 1) - 127, power = min(14 - exponent, 126);
        up = __uint_as_float(static_cast<u32>(127 + power) << 23);
        down = __uint_as_float(static_cast<u32>(127 - power) << 23);
    }
    __device__ __forceinline__ u32 pair(u32 two) const {
        return pack_fp16(__uint_as_float(two << 16) * up, __uint_as_float(two & 0xffff0000u) * up);
    }
    __device__ __forceinline__ uint4 unit(uint4 eight) const {
        return make_uint4(pair(eight.x), pair(eight.y), pair(eight.z), pair(eight.w));
    }
};

// The larger magnitude of `most` and two bf16.
__device__ __forceinline__ u32 most_of(u32 most, u32 two) {
    return max(most, max(two << 16 & 0x7fffffffu, two & 0x7fff0000u));
}
__device__ __forceinline__ u32 most_of(u32 most, uint4 eight) {
    return most_of(most_of(most_of(most_of(most, eight.x), eight.y), eight.z), eight.w);
}
// Of LANES lanes in a row.
template <int LANES = 32>
__device__ __forceinline__ u32 most_of_lanes(u32 most) {
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) most = max(most, __shfl_xor_sync(~0u, most, lanes));
    return most;
}
