// SPDX-License-Identifier: Apache-2.0
// The prefix sum of a block.
#pragma once

#include "common/element.cuh"

// Sum of value over the lanes up to this one.
__device__ __forceinline__ u64 scan_warp(u64 value) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u64 other = __shfl_up_sync(~0u, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// Sum of value over the threads before this one, of a block of `warps` warps; sums: scratch, one per lane.
// After it, sums[warps - 1] is the sum over all.
__device__ __forceinline__ u64 scan(u64 value, u64* sums, int warps) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u64 total = scan_warp(value);
    if (lane == 31) sums[warp] = total;
    __syncthreads();
    if (warp == 0) {
        sums[lane] = scan_warp(lane < warps ? sums[lane] : 0);
    }
    __syncthreads();
    return total - value + (warp ? sums[warp - 1] : 0);
}

// As scan; sums are then those of each warp, and no thread may write them again. Faster where threads of few
// warps need what it returns.
__device__ __forceinline__ u64 scan_once(u64 value, u64* sums) {
    const int warp = threadIdx.x / 32;
    const u64 total = scan_warp(value);
    if (threadIdx.x % 32 == 31) sums[warp] = total;
    __syncthreads();
    u64 before = 0;
#pragma unroll 4
    for (int w = 0; w < warp; ++w) before += sums[w];
    return total - value + before;
}
