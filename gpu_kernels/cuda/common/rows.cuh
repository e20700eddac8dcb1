// SPDX-License-Identifier: Apache-2.0
// Long rows read by the lanes of a warp, 16 bytes at a time.
#pragma once

#include "common/copies.cuh"

// sum + a . b of eight elements each, in order.
__device__ __forceinline__ float dot(uint4 a, uint4 b, float sum) {
    const u32 left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum = fmaf(first_of(left[i]), first_of(right[i]), sum);
        sum = fmaf(second_of(left[i]), second_of(right[i]), sum);
    }
    return sum;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}
