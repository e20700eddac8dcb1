// Activations of few pairs, unsorted, through int4_24 experts: act[p] = silu(x Wg_e^T) * (x Wu_e^T), x =
// hidden[p / K], e = ids[p].
//
// | argument | shape            | dtype | |
// |----------|------------------|-------|----------------------------------------------------------------|
// | hidden   | [T, H]           | bf16  | row-major, 16 bytes                                            |
// | w13      | [E, H/64, 2I, 2] | int64 | words; gate row c is row c * row_step, its up row up_rows later |
// | ids, expert_map, num_tokens |  |  | as routing_sort                                                |
// | act      | [P, I]           | bf16  | out; rows of pairs without an expert are not written           |
//
// P = T*K; H and I are multiples of 64. Blocks: (I / (8 * ROW_TILES), P); threads: 32 * WARPS. The warps
// share the channels of H: each takes every WARPS-th pair of slabs. Dynamic shared memory: WARPS times the
// sums of its rows, WARPS rings, zeros, then x: 2 * H bytes. Consumer: int4_24_few_down.
#include "common/routing.cuh"
#include "sm80/int4_24_column.cuh"

#ifndef WARPS
#define WARPS 4
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    int4_24_few_gate_up(const u16* hidden, const uint4* w13, const Id* ids, const int* expert_map,
                        const int* num_tokens, u16* act, int P, int E_ids, int K, int H, int I, int row_step,
                        int up_rows) {
    auto* parts = reinterpret_cast<float (*)[SLAB_ROWS]>(dynamic_memory());
    unsigned char* memory = dynamic_memory() + WARPS * SLAB_ROWS * 4;
    uint4* zeros = reinterpret_cast<uint4*>(memory + WARPS * RING_BYTES);
    const int pair = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int channel = blockIdx.x * 8 * ROW_TILES;
    wait_for_predecessor();
    let_successor_start();
    const int e = expert_of(ids, expert_map, pair, pair_limit(num_tokens, P, K), E_ids);
    if (e < 0) return;
    const int slabs = H / 64;
    Column column;
    column.ring = memory + warp * RING_BYTES;
    column.slab_bytes = 2 * I * 16;
    column.pair_bytes = 2 * I * 32 * WARPS;
    column.step = 2 * WARPS;
    column.left = slabs - 2 * warp;
    // a product's low rows are gate rows, its high ones the up rows of the same channels
    const int row = (channel + lane / 16 * 8 + lane % 8) * row_step + lane / 8 % 2 * up_rows;
    column.rows = reinterpret_cast<const unsigned char*>(
        w13 + (static_cast<u64>(e) * slabs + 2 * warp) * (2 * I) + row);
    column.second = 16 * row_step * 16;
    column.start();
    load_column(zeros + ZERO_BYTES / 16, hidden + static_cast<u64>(pair / K) * H, H, threadIdx.x, 32 * WARPS);
    clear_zeros(zeros, threadIdx.x);
    __syncthreads();
    float sums[ROW_TILES][2];
    column.multiply(sums, reinterpret_cast<const unsigned char*>(zeros), 2 * warp, slabs, H & 63);
    if (lane % 4 == 0)
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
            parts[warp][16 * m + lane / 4] = sums[m][0];
            parts[warp][16 * m + 8 + lane / 4] = sums[m][1];
        }
    __syncthreads();
    const int c = threadIdx.x;
    if (c >= 8 * ROW_TILES) return;
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        gate += parts[w][c / 8 * 16 + c % 8];
        up += parts[w][c / 8 * 16 + 8 + c % 8];
    }
    act[static_cast<u64>(pair) * I + channel + c] = static_cast<u16>(pack(silu_mul(gate, up), 0.0f));
}
