// SPDX-License-Identifier: Apache-2.0
// Down projection and weighted sum of few tokens, unsorted, through int4_24 experts: out[t] (+)= sum over
// ascending k of weights[t, k] * (act[t*K + k] Wd_e^T), in fp32, one rounding.
//
// | argument | shape           | dtype | |
// |----------|-----------------|-------|-------------------------------------------------|
// | act      | [T*K, I]        | bf16  | of int4_24_few_gate_up; row-major, 16 bytes     |
// | w2       | [E, I/64, H, 2] | int64 | words                                           |
// | ids, expert_map, num_tokens |  |  | as routing_sort                                  |
// | weights  | [T, K]          | fp32  | of a pair without an expert: not used           |
// | out      | [T, H]          | bf16; OUT32: fp32 | out; ADD: added to                      |
//
// H and I are multiples of 64, known at compile time. Blocks: (H / (8 * EIGHTS), T); threads: 32 * K * WARPS.
// WARPS warps multiply a pair. They request their first words before they wait for the activations.
#ifndef EIGHTS
#define EIGHTS 4  // of rows a block
#endif
#define TILES ((EIGHTS + 1) / 2)

#include "common/routing.cuh"
#include "common/sum_out.cuh"
#include "sm90/int4_24_column.cuh"

#ifndef TOP_K
#define TOP_K 8
#endif
#ifndef WARPS
#define WARPS 1  // a pair
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif

constexpr int K = TOP_K, H = HIDDEN, I = INTER, ROWS = 16 * TILES;
constexpr int PAIRS = (I / 64 + 1) / 2, COUNT = (PAIRS + WARPS - 1) / WARPS;
constexpr int COLUMN = COUNT * WARPS * PAIR_BYTES;

extern "C" __global__ void __launch_bounds__(32 * K * WARPS, BLOCKS)
    int4_24_few_down(const u16* act, const unsigned char* w2, const Id* ids, const int* expert_map,
                     const int* num_tokens, const float* weights, void* out, int P, int E_ids) {
    auto& parts = *reinterpret_cast<float (*)[K][ROWS]>(dynamic_memory());
    auto& halves = *reinterpret_cast<float (*)[WARPS][K][ROWS]>(dynamic_memory());
    const int t = blockIdx.y, k = threadIdx.x / 32 / WARPS, warp = threadIdx.x / 32 % WARPS,
              lane = threadIdx.x % 32, pair = t * K + k;
    unsigned char* column = dynamic_memory() + WARPS * K * ROWS * 4 + k * COLUMN;
    const int row = blockIdx.x * (8 * EIGHTS);
    // ids and weights are safe to read: the predecessor waited for them before it triggered this launch
    if (num_tokens && t >= *num_tokens) return;
    const int e = expert_of(ids, expert_map, pair, P, E_ids);
    const float weight = e >= 0 ? weights[pair] : 0.0f;
    Column<COUNT, WARPS, I / 64, H, EIGHTS % 2 != 0> of;
    if (e >= 0) of.start(w2 + static_cast<u64>(e) * (I / 64) * (H * 16), row + lane / 4, warp, 128, 256);
    wait_for_predecessor();
    let_successor_start();
    if (e >= 0) {
        const uint4* x = reinterpret_cast<const uint4*>(act + static_cast<u64>(pair) * I);
#pragma unroll 4
        for (int i = warp * 32 + lane; i < COUNT * WARPS * 16; i += 32 * WARPS)
            put_channels(column, i, i < I / 8 ? x[i] : make_uint4(0, 0, 0, 0));
    }
    if (WARPS > 1)
        __syncthreads();
    else
        __syncwarp();
    float sums[TILES][2] = {};
    if (e >= 0) of.multiply(sums, column, E_ids >> 20);
    if (lane % 4 == 0) {
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            halves[warp][k][16 * m + lane / 4] = e >= 0 ? weight * sums[m][0] : 0.0f;
            halves[warp][k][16 * m + 8 + lane / 4] = e >= 0 ? weight * sums[m][1] : 0.0f;
        }
    }
    __syncthreads();
    if (WARPS > 1) {
        for (int i = threadIdx.x; i < K * ROWS; i += 32 * K * WARPS)
#pragma unroll
            for (int w = 1; w < WARPS; ++w) parts[i / ROWS][i % ROWS] += halves[w][i / ROWS][i % ROWS];
        __syncthreads();
    }
    for (int c = threadIdx.x; c < 8 * EIGHTS; c += 32 * K * WARPS)
        write_sum(parts, c, out, static_cast<u64>(t) * H + row + c);
}
