// SPDX-License-Identifier: Apache-2.0
// Nothing but mma.sync.m16n8k16 (bf16, fp32 sums): its rate is the ceiling of kernels for sm_80.
//
// | argument | shape               | dtype | |
// |----------|---------------------|-------|-----------------------------------------|
// | words    | [24, threads]       | int32 | operands: pairs of bf16                 |
// | out      | [blocks * threads]  | fp32  | a sum of all products of a thread       |
// | steps    |                     | int32 | of 32 products a warp                   |
#include "sm80/mma.cuh"

extern "C" __global__ void __launch_bounds__(384, 1) mma_loop(const u32* words, float* out, int steps) {
    u32 a[4][4], b[4][2];
    for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = words[i * blockDim.x + threadIdx.x];
    for (int i = 0; i < 8; ++i) b[i / 2][i % 2] = words[(16 + i) * blockDim.x + threadIdx.x];
    float sums[4][8][4] = {};
    for (int step = 0; step < steps; ++step)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int m = 0; m < 4; ++m) multiply_add(sums[m][n], a[m], b[n % 4][n / 4], b[n % 4][1 - n / 4]);
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 128; ++i) total += sums[i / 32][i / 4 % 8][i % 4];
    out[blockIdx.x * blockDim.x + threadIdx.x] = total;
}
