// SPDX-License-Identifier: Apache-2.0
// The prefix sum of a block.
#pragma once

#include "common/element.cuh"

// Sum of value over the threads before this one, of a block of `warps` warps; sums: scratch, one per lane.
// After it, sums[warps - 1] is the sum over all.
__device__ __forceinline__ u64 scan(u64 value, u64* sums, int warps) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 total = value;
    for (int step = 1; step < 32; step *= 2) {
        const u64 other = __shfl_up_sync(~0u, total, step);
        if (lane >= step) total += other;
    }
    if (lane == 31) sums[warp] = total;
    __syncthreads();
    if (warp == 0) {
        u64 sum = lane < warps ? sums[lane] : 0;
        for (int step = 1; step < 32; step *= 2) {
            const u64 other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        sums[lane] = sum;
    }
    __syncthreads();
    return total - value + (warp ? sums[warp - 1] : 0);
}
