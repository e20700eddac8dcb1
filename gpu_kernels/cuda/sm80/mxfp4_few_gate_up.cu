// SPDX-License-Identifier: Apache-2.0
// Activations of few pairs, unsorted, through MXFP4 experts: act[p] = activation(x Wg_e^T, x Wu_e^T), x =
// hidden[p / K], e = ids[p].
//
// | argument | shape        | dtype | |
// |----------|--------------|-------|-------------------------------------------------------------------|
// | hidden   | [T, H]       | bf16  | row-major, 16 bytes                                               |
// | blocks   | [E, 2I, H/2] | uint8 | 16 bytes; gate row c is row c, its up row I + c; INTERLEAVED: 2 c, 2 c + 1 |
// | scales   | [E, 2I, H/32] | uint8 | 16 bytes; rows as of blocks                                      |
// | biases, biases32 | [E, 2I] | bf16, fp32 | rows as of blocks; one is null; BIASED 0: both            |
// | ids, expert_map, num_tokens |  |  | as routing_sort                                               |
// | act      | [P, I]       | bf16  | out; rows of pairs without an expert are not written              |
//
// BOXED: blocks and scales as mxfp4_boxes has them, and blocks: (P, ceil(I / 128) * 16 / ROW_TILES).
// P = T * TOP_K; H = HIDDEN and I = INNER are multiples of 32. Blocks: (P, I / (8 * ROW_TILES)), so that
// pairs of one expert read its rows at the same time; threads: 32 * WARPS. The warps share the channels: each
// takes every WARPS-th chunk of 128. CLAMPED: clamped_swiglu. Dynamic shared memory: WARPS times the sums of
// the rows, then 64 bytes of zeros, then x in chunks of 256 bytes, then the rows' scales. Consumer:
// mxfp4_few_down.
#include "common/activation.cuh"
#include "common/routing.cuh"
#include "sm80/mxfp4_column.cuh"

#ifndef WARPS
#define WARPS 4
#endif
#ifndef TOP_K
#define TOP_K 8
#endif
#ifndef HIDDEN
#define HIDDEN 2048
#endif
#ifndef INNER
#define INNER 768
#endif
#ifndef INTERLEAVED
#define INTERLEAVED 0
#endif

// sizes of the layer: constants spare a block half of the instructions before its first product
constexpr int K = TOP_K, H = HIDDEN, I = INNER, row_step = INTERLEAVED ? 2 : 1, up_rows = INTERLEAVED ? 1 : I;
constexpr int ROWS = 16 * ROW_TILES;

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    mxfp4_few_gate_up(const u16* hidden, const unsigned char* blocks, const unsigned char* scales,
                      const u16* biases, const float* biases32, const Id* ids, const int* expert_map,
                      const int* num_tokens, u16* act, int P, int E_ids) {
    auto* parts = reinterpret_cast<float (*)[ROWS]>(dynamic_memory());
    uint4* zeros = reinterpret_cast<uint4*>(dynamic_memory() + WARPS * ROWS * 4);
    uint4* x = zeros + 4;
    u64* own_scales = reinterpret_cast<u64*>(x + (H + CHUNK - 1) / CHUNK * 16);
    const int pair = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int groups = H / 32;
    wait_for_predecessor();
    let_successor_start();
    // beside the expert's number, which all other requests wait for
    const u16* token = hidden + static_cast<u64>(pair / K) * H;
    ColumnCopy<H, 32 * WARPS> copy_x;
    copy_x.request(token, threadIdx.x);
    const int e = expert_of(ids, expert_map, pair, pair_limit(num_tokens, P, K), E_ids);
    if (e < 0) return;
#if BOXED
    const int fragment = blockIdx.y * ROW_TILES;
    const u64 first_row = static_cast<u64>(e) * (2 * I);
    Column column;
    column.box = Box::of_gate_up(fragment / 8, I);
    column.fragment = fragment % 8;
    const u64 before = (first_row + column.box.before) * groups;
    column.weights = blocks + 16 * before;
#else
    const int channel = blockIdx.y * 8 * ROW_TILES;
    const u64 first_row = static_cast<u64>(e) * (2 * I) + channel * row_step;
    // a product's low rows are gate rows, its high ones the up rows of the same channels
    Column column;
    column.weights = blocks + (first_row + lane / 4 * row_step) * (H / 2) + (4 * warp + lane % 4) * 16;
    column.high = up_rows * (H / 2);
    column.tile = 8 * row_step * (H / 2);
#endif
    column.groups = groups;
    column.first = warp;
    column.step = WARPS;
#if BOXED
    BoxScales copy{reinterpret_cast<u32*>(own_scales),
                   scales + before,
                   column.box,
                   column.fragment,
                   groups,
                   ROW_TILES * column.box.rows * groups / 4,
                   static_cast<int>(threadIdx.x),
                   32 * WARPS,
                   {}};
#else
    // in memory the rows are one run, or gate rows and up rows
    const int runs = row_step == 2 ? 1 : 2, units = ROWS / 8 * groups / runs;
    ScaleCopy copy{own_scales,
                   reinterpret_cast<const u64*>(scales + first_row * groups),
                   static_cast<u64>(up_rows) * groups / 8,
                   units,
                   runs * units,
                   static_cast<int>(threadIdx.x),
                   32 * WARPS,
                   {}};
#endif
    copy.request();
    column.start();
    const int c = threadIdx.x;
#if BOXED
    const int f = fragment + c / 8,
              channel = f / 16 * 128 + c % 8 / 2 * 32 + c % 2 * 4 + f % 16 / 4 * 8 + f % 4;
    const u64 row = first_row + channel * row_step;
    const bool mine = c < 8 * ROW_TILES && channel < I;
#else
    const u64 row = first_row + c * row_step;
    const bool mine = c < 8 * ROW_TILES;
#endif
    float gate = mine ? Biases{biases, biases32}[row] : 0.0f,
          up = mine ? Biases{biases, biases32}[row + up_rows] : 0.0f;
    if (threadIdx.x < 4) zeros[threadIdx.x] = make_uint4(0, 0, 0, 0);
    bool large = copy_x.keep<true>(x, threadIdx.x);
    large |= copy.keep();
    large = __syncthreads_or(large);
    if (large) {
        copy_x.request(token, threadIdx.x);
        copy_x.keep<false>(x, threadIdx.x);
        __syncthreads();
    }
    float sums[ROW_TILES][2];
#if BOXED
    const auto* of_lane = reinterpret_cast<const unsigned char*>(own_scales);
    constexpr int high_scales = 0, tile_scales = 0;
#else
    const unsigned char* of_lane =
        reinterpret_cast<const unsigned char*>(own_scales) + lane / 4 * row_step * groups;
    const int high_scales = (runs == 1 ? 1 : ROWS / 2) * groups, tile_scales = 8 * row_step * groups;
#endif
    if (large)
        column.multiply<true>(sums, of_lane, high_scales, tile_scales, x, zeros);
    else
        column.multiply<false>(sums, of_lane, high_scales, tile_scales, x, zeros);
    if (lane % 4 == 0)
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
            parts[warp][16 * m + lane / 4] = sums[m][0];
            parts[warp][16 * m + 8 + lane / 4] = sums[m][1];
        }
    __syncthreads();
    if (!mine) return;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        gate += parts[w][c / 8 * 16 + c % 8];
        up += parts[w][c / 8 * 16 + 8 + c % 8];
    }
    act[static_cast<u64>(pair) * I + channel + (BOXED ? 0 : c)] =
        static_cast<u16>(pack(activated(gate, up), 0.0f));
}
