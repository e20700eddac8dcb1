// SPDX-License-Identifier: Apache-2.0
// Sorted rows through their MXFP4 experts, on the tensor cores of sm_90a, both products in one launch:
// act[row] = activation(x Wg_e^T + bg_e, x Wu_e^T + bu_e), x = hidden[row_tokens[row]];
// out[row] = act[row] Wd_e^T + bd_e. Weights become bf16 in registers; sums are fp32.
//
// | argument        | shape                        | dtype |                                                  |
// |-----------------|------------------------------|-------|--------------------------------------------------|
// | gate_up         | (H/2, 32, I/32, 2, E)        | uint8 | tensor map, innermost dimension first            |
// | down            | (I/2, 4, 2, H/8, E)          | uint8 | tensor map: channels, rows 2 r + s of eight      |
// | gate_up_scales  | [E, 2I, H/32]                | uint8 | row-major, 16 bytes                              |
// | down_scales     | [E, H, I/32]                 | uint8 | row-major, 16 bytes                              |
// | gate_up_bf16, gate_up_fp32 | [E, 2I]           |       | BIASED: the bias in its dtype; the other: null   |
// | down_bf16, down_fp32       | [E, H]            |       | as above                                         |
// | hidden          | [T, H in units]              | bf16  | of mxfp4_order                                   |
// | row_tokens      | [P]                          | int32 |                                                  |
// | tiles           | [bound]                      | Tile  | of routing_sort, tile_rows = MAX_N; their done: 0 |
// | num_tiles       | [2]                          | int32 | tiles in use; 0, counts the items that blocks took |
// | act             | [P, I in units]              | bf16  | scratch, in mxfp4_order's order; row-major, 16 bytes |
// | out             | [P, H]                       | bf16  | row-major, 16 bytes; only rows of tiles written  |
//
// H and I are multiples of 32; a unit is 128. A box of a tensor map is 256 channels by 128 rows, swizzled by
// 128 bytes; of gate_up by 16 gate rows of each 32 of 128, and the up rows of the same channels.
//
// BOXED: gate_up and down are addresses, and these and the scales are as mxfp4_boxes has them.
// WARP_PRODUCTS: warps multiply by `mma.sync`; BY_COLUMNS: warpgroups by wgmma, in a loop for each number of
// rows; else warpgroups by wgmma for groups of rows.
//
// Threads: 128 * (1 + GROUPS): a producer warpgroup, GROUPS consumer warpgroups. Blocks: BLOCKS per
// multiprocessor. A work item is a tile times WEIGHT_ROWS rows of its expert's weights; items.cuh says how
// blocks claim them. A down item starts when the activations of its tile are complete. The items that make
// them were claimed earlier and wait for nothing, so no deadlock is possible. Weights are the M side: a warp
// reads their bytes from shared memory and makes fragments of them. The rows of a tile are the N side: N is
// their number rounded up, at most MAX_N. READ_ONCE: weights are evicted from L2 first.
//
// Shared memory: WEIGHT_STAGES * (WEIGHT_ROWS x 256 channels), ROW_STAGES * (MAX_N rows x ROW_UNITS x 128
// channels), two output buffers per consumer warpgroup (not DIRECT), the scales of two items, barriers,
// items. Weights and scales come through the copy engine; rows come through cp.async, since they are
// scattered. Producer: routing_sort, mxfp4_order. Consumer: combine.
#include "common/activation.cuh"
#include "sm90/mxfp4_chunks.cuh"
#include "sm90/mxfp4_loads.cuh"
#include "sm90/mxfp4_rows_out.cuh"
#if WARP_PRODUCTS
#include "sm90/mxfp4_by_warps.cuh"
#elif BY_COLUMNS
#include "sm90/mxfp4_by_columns.cuh"
#else
#include "sm90/mxfp4_by_warpgroups.cuh"
#endif

// Biases of this thread's two rows of each part; zero past the last row.
struct RowBiases {
    float rows[PARTS][2] = {};

    __device__ __forceinline__ RowBiases(const Biases& biases, const Work& work, const Item& item) {
#if BIASED
        const int group = threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4;
        const int width = item.kind == DOWN ? work.H : 2 * work.I;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const int at = item.block * (WEIGHT_ROWS / 64) + group * PARTS + part;  // of 64 weight rows
            int first = at * 64 + warp * 16 + g, second = first + 8;
            if (item.kind != DOWN) {
                const int channel = at / 4 * UNIT + at % 4 * 8 + g / 2 * 32 + g % 2 * 4 + warp;
                first = channel >= work.I ? width : INTERLEAVED ? 2 * channel : channel;
                second = channel >= work.I ? width : INTERLEAVED ? first + 1 : first + work.I;
            }
            const u64 expert = static_cast<u64>(item.expert) * width;
            if (first < width) rows[part][0] = biases[expert + first];
            if (second < width) rows[part][1] = biases[expert + second];
        }
#endif
    }
    __device__ __forceinline__ float low(int part, float sum) const { return sum + rows[part][0]; }
    __device__ __forceinline__ float high(int part, float sum) const { return sum + rows[part][1]; }
    __device__ __forceinline__ float both(int part, float gate, float up) const {
        return activated(low(part, gate), high(part, up));
    }
};

extern "C" __global__ void __launch_bounds__(128 * (1 + GROUPS), BLOCKS)
#if BOXED
    mxfp4_mlp(const unsigned char* gate_up, const unsigned char* down,
#else
    mxfp4_mlp(const __grid_constant__ TensorMap gate_up, const __grid_constant__ TensorMap down,
#endif
              const unsigned char* gate_up_scales, const unsigned char* down_scales, const u16* gate_up_bf16,
              const float* gate_up_fp32, const u16* down_bf16, const float* down_fp32, const u16* hidden,
              const int* row_tokens, Tile* tiles, int* num_tiles, u16* act, u16* out, int H, int I) {
    const Shared shared(dynamic_memory());
    if (threadIdx.x == 0) {
#if !BOXED
        prefetch_map(&gate_up);
        prefetch_map(&down);
#endif
        shared.init();
    }
    __syncthreads();
    wait_for_predecessor();
    let_successor_start();

    const Work work(tiles, *num_tiles, (units_of(I) * 2 + BOXES - 1) / BOXES,
                    (H + WEIGHT_ROWS - 1) / WEIGHT_ROWS, H, I);
    if (threadIdx.x < 128) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0)
            load_weights(shared, weights_of(gate_up), weights_of(down), gate_up_scales, down_scales, work,
                         num_tiles + 1);
        if (threadIdx.x >= 32) load_rows(shared, hidden, act, row_tokens, work);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        Turns turns;
        Turn<SLOTS> slot;
        Sums sums;
        for (Item item = shared.items.hear(slot); item.kind != NONE; item = shared.items.hear(slot)) {
            const bool is_down = item.kind == DOWN;
            const Biases biases{is_down ? down_bf16 : gate_up_bf16, is_down ? down_fp32 : gate_up_fp32};
#if WARP_PRODUCTS && MAX_N * WEIGHT_ROWS / 64 / GROUPS < 48
            const RowBiases bias(biases, work, item);  // early: hides the latency
            multiply_rows<1>(shared, turns, sums, item, work.depth(item), I);
#elif BY_COLUMNS
            multiply_rows<8>(shared, turns, sums, item, work.depth(item), I, H);
            const RowBiases bias(biases, work, item);
#elif WARP_PRODUCTS
            multiply_rows<1>(shared, turns, sums, item, work.depth(item), I);
            const RowBiases bias(biases, work, item);
#else
            multiply(shared, turns, sums, item, work.depth(item), I);
            const RowBiases bias(biases, work, item);
#endif
#if DIRECT
            write_rows(sums, bias, is_down ? out : act, item, is_down ? H : units_of(I) * UNIT,
                       &tiles[item.tile].done);
#else
            if (is_down)
                write<true, GROUPS>(shared.pieces, sums, bias, out, item, H, nullptr);
            else
                write<false, GROUPS>(shared.pieces, sums, bias, act, item, units_of(I) * UNIT,
                                     &tiles[item.tile].done);
#endif
        }
    }
}
