// SPDX-License-Identifier: Apache-2.0
// Activations of few pairs, unsorted, through int4_24 experts: act[p] = silu(x Wg_e^T) * (x Wu_e^T), x =
// hidden[p / K], e = ids[p].
//
// | argument | shape            | dtype | |
// |----------|------------------|-------|----------------------------------------------------------------|
// | hidden   | [T, H]           | bf16  | row-major, 16 bytes                                            |
// | w13      | [E, H/64, 2I, 2] | int64 | words                                                          |
// | ids, expert_map, num_tokens |  |  | as routing_sort                                                |
// | act      | [P, I]           | bf16  | out; rows of pairs without an expert are not written           |
//
// P = T*K; H and I are multiples of 64, known at compile time. Blocks: (I / (8 * TILES * TEAMS), P); threads:
// 32 * WARPS * TEAMS. The WARPS warps of a team share the channels of H.
#include "common/routing.cuh"
#include "sm90/int4_24_column.cuh"

#ifndef WARPS
#define WARPS 4
#endif
#ifndef TEAMS
#define TEAMS 2
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef INTERLEAVED
#define INTERLEAVED 0
#endif

constexpr int H = HIDDEN, I = INTER, THREADS = 32 * WARPS * TEAMS;
constexpr int PAIRS = (H / 64 + 1) / 2, COUNT = (PAIRS + WARPS - 1) / WARPS;
constexpr int HELD = (COUNT * WARPS * 16 + THREADS - 1) / THREADS;  // 16 bytes of x, of a thread

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    int4_24_few_gate_up(const u16* hidden, const unsigned char* w13, const Id* ids, const int* expert_map,
                        const int* num_tokens, u16* act, int P, int E_ids, int K) {
    auto* parts = reinterpret_cast<float (*)[TILES * 16]>(dynamic_memory());
    unsigned char* column = dynamic_memory() + WARPS * TEAMS * TILES * 64;
    const int pair = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % WARPS,
              team = threadIdx.x / 32 / WARPS;
    const int channel = (blockIdx.x * TEAMS + team) * 8 * TILES;
    wait_for_predecessor();
    let_successor_start();
    // all at once, and beside the expert's number, which the requests of words wait for
    const uint4* x = reinterpret_cast<const uint4*>(hidden + static_cast<u64>(pair / K) * H);
    uint4 held[HELD];
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const int i = threadIdx.x + j * THREADS;
        held[j] = i < H / 8 ? x[i] : make_uint4(0, 0, 0, 0);
    }
    const int e = expert_of(ids, expert_map, pair, pair_limit(num_tokens, P, K), E_ids);
    if (e < 0) return;
    Column<COUNT, WARPS, H / 64, 2 * I> of;
    of.start(w13 + static_cast<u64>(e) * (H / 64) * (2 * I * 16),
             INTERLEAVED ? (channel + lane / 4) * 2 : channel + lane / 4, warp, INTERLEAVED ? 16 : I * 16,
             INTERLEAVED ? 256 : 128);
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
        const int i = threadIdx.x + j * THREADS;
        if (i < COUNT * WARPS * 16) put_channels(column, i, held[j]);
    }
    __syncthreads();
    float sums[TILES][2];
    of.multiply(sums, column, E_ids >> 20);
    if (lane % 4 == 0)
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            parts[threadIdx.x / 32][16 * m + lane / 4] = sums[m][0];
            parts[threadIdx.x / 32][16 * m + 8 + lane / 4] = sums[m][1];
        }
    __syncthreads();
    const int c = threadIdx.x;
    if (c >= 8 * TILES * TEAMS) return;
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const float* from = parts[c / (8 * TILES) * WARPS + w] + c % (8 * TILES) / 8 * 16 + c % 8;
        gate += from[0];
        up += from[8];
    }
    act[static_cast<u64>(pair) * I + blockIdx.x * (8 * TILES * TEAMS) + c] =
        static_cast<u16>(pack(silu_mul(gate, up), 0.0f));
}
