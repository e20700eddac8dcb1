// SPDX-License-Identifier: Apache-2.0
// Down projection and weighted sum of few tokens without a sort: out[t] (+)= sum over ascending k of
// weights[t, k] * (act[t*K + k] Wd_e^T), in fp32, one rounding.
//
// | argument   | shape     | dtype      |                                                                  |
// |------------|-----------|------------|------------------------------------------------------------------|
// | act        | [T*K, I]  | bf16, fp16 | of few_gate_up; row-major, 16 bytes                              |
// | down       | [E, H, I] | as act     | row-major, 16 bytes                                              |
// | ids, expert_map, num_tokens |  |  | as routing_sort                                                   |
// | weights    | [T, K]    | fp32       | of a pair without an expert: not used                            |
// | out        | [T, H]    | as act; OUT32: fp32 | out; ADD: added to                                      |
//
// I is a multiple of 64. Blocks: (ceil(H / COLUMNS), T); threads: 32 * K. Warp k handles pair k: it reads
// COLUMNS rows of its expert's weights. It loads the first PREFETCH chunks into registers before it waits for
// the activations.
#include "common/routing.cuh"
#include "common/rows.cuh"
#include "common/sum_out.cuh"

#ifndef TOP_K
#define TOP_K 8
#endif
#ifndef COLUMNS
#define COLUMNS 4
#endif
#ifndef PREFETCH
#define PREFETCH 3
#endif

constexpr int K = TOP_K;

extern "C" __global__ void __launch_bounds__(32 * K)
    few_down(const u16* act, const u16* down, const Id* ids, const int* expert_map, const int* num_tokens,
             const float* weights, void* out, int P, int E_ids, int H, int I) {
    __shared__ float parts[K][COLUMNS];
    const int t = blockIdx.y, k = threadIdx.x / 32, lane = threadIdx.x % 32, pair = t * K + k;
    const int column = blockIdx.x * COLUMNS;
    // ids and weights are safe to read: the predecessor waited for them before it triggered this launch
    if (num_tokens && t >= *num_tokens) return;
    const int e = expert_of(ids, expert_map, pair, P, E_ids);
    const float weight = e >= 0 ? weights[pair] : 0.0f;
    const int chunks = I / 8;
    const uint4* rows[COLUMNS];
    uint4 held[COLUMNS][PREFETCH];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        rows[c] = reinterpret_cast<const uint4*>(
            down + (static_cast<u64>(max(e, 0)) * H + min(column + c, H - 1)) * I);
#pragma unroll
        for (int j = 0; j < PREFETCH; ++j)
            held[c][j] = e >= 0 && lane + 32 * j < chunks ? load_once(rows[c] + lane + 32 * j)
                                                          : make_uint4(0, 0, 0, 0);
    }
    wait_for_predecessor();
    let_successor_start();
    float sum[COLUMNS] = {};
    if (e >= 0) {
        const uint4* a = reinterpret_cast<const uint4*>(act + static_cast<u64>(pair) * I);
#pragma unroll
        for (int j = 0; j < PREFETCH; ++j) {
            if (lane + 32 * j < chunks) {
                const uint4 as = a[lane + 32 * j];
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) sum[c] = dot(held[c][j], as, sum[c]);
            }
        }
        for (int i = lane + 32 * PREFETCH; i < chunks; i += 32) {
            const uint4 as = a[i];
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) sum[c] = dot(load_once(rows[c] + i), as, sum[c]);
        }
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) sum[c] = warp_sum(sum[c]);
    if (lane == 0) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) parts[k][c] = e >= 0 ? weight * sum[c] : 0.0f;
    }
    __syncthreads();
    const int c = threadIdx.x;
    if (c >= COLUMNS || column + c >= H) return;
    const u64 at = static_cast<u64>(t) * H + column + c;
    write_sum(parts, c, out, at);
}
