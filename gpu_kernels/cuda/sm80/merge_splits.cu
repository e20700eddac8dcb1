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
// ROTATE: out is multiplied by the Hadamard matrix. Blocks: R; threads: 32 * WARPS. Warp w takes every
// WARPS-th part, and loads the first AHEAD of them before it knows the largest sum: one wait for memory
// instead of two.
#include "sm80/hadamard.cuh"
#include "sm80/halves.cuh"

#ifndef WARPS
#define WARPS 4
#endif
#ifndef ROTATE
#define ROTATE 0
#endif

constexpr int AHEAD = 5;

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    merge_splits(const float4* partial, const float* lse, u16* out, float* whole, int splits) {
    __shared__ float4 sums[WARPS][32];
    __shared__ float totals[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u64 r = blockIdx.x;
    const float NONE = __int_as_float(0xff800000);
    partial += r * splits * 32 + lane, lse += r * splits;
    let_successor_start();
    wait_for_predecessor();
    float4 first[AHEAD];
    float shares[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        const int s = warp + WARPS * i;
        shares[i] = s < splits ? lse[s] : NONE;
        first[i] = s < splits ? partial[s * 32] : make_float4(0, 0, 0, 0);
    }
    float most = NONE;
    for (int s = lane; s < splits; s += 32) most = fmaxf(most, lse[s]);
#pragma unroll
    for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    float total = 0;
    float4 sum = make_float4(0, 0, 0, 0);
    const auto add = [&](float share, const float4& x) {
        const float weight = share == NONE ? 0.0f : power_of_two(share - most);
        total += weight;
        sum.x = fmaf(x.x, weight, sum.x), sum.y = fmaf(x.y, weight, sum.y);
        sum.z = fmaf(x.z, weight, sum.z), sum.w = fmaf(x.w, weight, sum.w);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) add(shares[i], first[i]);
#pragma unroll 4
    for (int s = warp + WARPS * AHEAD; s < splits; s += WARPS) add(lse[s], partial[s * 32]);
    sums[warp][lane] = sum;
    if (lane == 0) totals[warp] = total;
    __syncthreads();
    if (warp) return;
#pragma unroll
    for (int w = 1; w < WARPS; ++w) {
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
