// Long rows read by the lanes of a warp, 16 bytes at a time.
#pragma once

#include "common/element.cuh"

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

// Of memory that nothing reads again soon and no kernel writes: weights.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
    uint4 words;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from));
    return words;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}
