// SPDX-License-Identifier: Apache-2.0
// Merge the parts of bucketed_attention by their log-sum-exp, in a fixed order; heads of 128 channels.
//
// | argument | shape          | dtype |                                       |
// |----------|----------------|-------|---------------------------------------|
// | partial  | [R, splits, 128] | fp32 | as bucketed_attention writes it      |
// | lse      | [R, splits]    | fp32  | log2 of the sum; -inf: no key         |
// | out      | [R, 128]       | bf16  | out; 0 where no part had a key        |
// | whole    | [R]            | fp32  | out, or null: log2 of the whole sum   |
//
// ROTATE: out is multiplied by the Hadamard matrix. Blocks: R; threads: 128. Warp w takes every fourth part.
#include "sm80/hadamard.cuh"
#include "sm80/halves.cuh"

#ifndef ROTATE
#define ROTATE 0
#endif

extern "C" __global__ void __launch_bounds__(128)
    merge_splits(const float4* partial, const float* lse, u16* out, float* whole, int splits) {
    __shared__ float4 sums[4][32];
    __shared__ float totals[4];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u64 r = blockIdx.x;
    let_successor_start();
    wait_for_predecessor();
    float most = __int_as_float(0xff800000);
    for (int s = lane; s < splits; s += 32) most = fmaxf(most, lse[r * splits + s]);
#pragma unroll
    for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    float total = 0;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int s = warp; s < splits; s += 4) {
        const float share = lse[r * splits + s];
        const float weight = share == __int_as_float(0xff800000) ? 0.0f : power_of_two(share - most);
        const float4 x = partial[(r * splits + s) * 32 + lane];
        total += weight;
        sum.x = fmaf(x.x, weight, sum.x), sum.y = fmaf(x.y, weight, sum.y);
        sum.z = fmaf(x.z, weight, sum.z), sum.w = fmaf(x.w, weight, sum.w);
    }
    sums[warp][lane] = sum;
    if (lane == 0) totals[warp] = total;
    __syncthreads();
    if (warp) return;
#pragma unroll
    for (int w = 1; w < 4; ++w) {
        const float4 x = sums[w][lane];
        total += totals[w];
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    if (whole && lane == 0) whole[r] = most + logarithm_to_two(total);
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    sum.x *= inverse, sum.y *= inverse, sum.z *= inverse, sum.w *= inverse;
    if (ROTATE) hadamard(sum);
    reinterpret_cast<uint2*>(out + r * 128)[lane] = make_uint2(pack(sum.x, sum.y), pack(sum.z, sum.w));
}
