// SPDX-License-Identifier: Apache-2.0
// Activations of few pairs, unsorted: act[p] = silu(x Wg_e^T) * (x Wu_e^T), x = hidden[p / K], e = ids[p].
//
// | argument   | shape  | dtype      |                                                                     |
// |------------|--------|------------|---------------------------------------------------------------------|
// | hidden     | [T, H] | bf16, fp16 | row-major, 16 bytes                                                 |
// | gate, up   | [E, I, H] | as hidden | row n of e at (e * rows_of_expert + n) * row_stride, 16 bytes     |
// | ids, expert_map, num_tokens |  |  | as routing_sort                                                   |
// | act        | [P, I] | as hidden  | out; rows of pairs without an expert are not written                |
//
// P = T*K; H is a multiple of 64. Blocks: (ceil(I / (WARPS * CHANNELS)), P); threads: 32 * WARPS. A warp
// makes CHANNELS channels. It reads their gate and up rows with 16 bytes per lane and UNROLL loads of each in
// flight. Bandwidth-bound: it reads each weight once. Consumer: few_down.
#include "common/routing.cuh"
#include "common/rows.cuh"

#ifndef WARPS
#define WARPS 4
#endif
#ifndef CHANNELS
#define CHANNELS 1
#endif
#ifndef UNROLL
#define UNROLL 4
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    few_gate_up(const u16* hidden, const u16* gate, const u16* up, const Id* ids, const int* expert_map,
                const int* num_tokens, u16* act, int P, int E_ids, int K, int H, int I, int rows_of_expert,
                int row_stride) {
    const int pair = blockIdx.y, lane = threadIdx.x % 32;
    const int first = (blockIdx.x * WARPS + threadIdx.x / 32) * CHANNELS;
    wait_for_predecessor();
    let_successor_start();
    const int e = expert_of(ids, expert_map, pair, pair_limit(num_tokens, P, K), E_ids);
    if (e < 0 || first >= I) return;
    const uint4* x = reinterpret_cast<const uint4*>(hidden + static_cast<u64>(pair / K) * H);
    const uint4* g[CHANNELS];
    const uint4* u[CHANNELS];
    float g_sum[CHANNELS] = {}, u_sum[CHANNELS] = {};
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        const u64 row = (static_cast<u64>(e) * rows_of_expert + min(first + c, I - 1)) * row_stride;
        g[c] = reinterpret_cast<const uint4*>(gate + row);
        u[c] = reinterpret_cast<const uint4*>(up + row);
    }
    const int chunks = H / 8;
    for (int i = lane; i < chunks; i += 32 * UNROLL) {
        uint4 gs[CHANNELS][UNROLL], us[CHANNELS][UNROLL];
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c)
#pragma unroll
            for (int j = 0; j < UNROLL; ++j) {
                const int at = min(i + 32 * j, chunks - 1);
                gs[c][j] = load_once(g[c] + at);
                us[c][j] = load_once(u[c] + at);
            }
#pragma unroll
        for (int j = 0; j < UNROLL; ++j) {
            if (i + 32 * j >= chunks) break;
            const uint4 xs = x[i + 32 * j];
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {
                g_sum[c] = dot(gs[c][j], xs, g_sum[c]);
                u_sum[c] = dot(us[c][j], xs, u_sum[c]);
            }
        }
    }
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        const float out = silu_mul(warp_sum(g_sum[c]), warp_sum(u_sum[c]));
        if (lane == 0 && first + c < I)
            act[static_cast<u64>(pair) * I + first + c] = static_cast<u16>(pack(out, 0.0f));
    }
}
