// SPDX-License-Identifier: Apache-2.0
// Down projection and weighted sum of few tokens, unsorted, through MXFP4 experts: out[t] (+)= sum over
// ascending k of weights[t, k] * (act[t*K + k] Wd_e^T + bd_e), in fp32, one rounding.
//
// | argument | shape        | dtype | |
// |----------|--------------|-------|-------------------------------------------------|
// | act      | [T*K, I]     | bf16  | of mxfp4_few_gate_up; row-major, 16 bytes       |
// | blocks   | [E, H, I/2]  | uint8 | 16 bytes                                        |
// | scales   | [E, H, I/32] | uint8 | 16 bytes                                        |
// | biases, biases32 | [E, H] | bf16, fp32 | one is null; BIASED 0: both             |
// | ids, expert_map, num_tokens |  |  | as routing_sort                             |
// | weights  | [T, K]       | fp32  | of a pair without an expert: not used           |
// | out      | [T, H]       | bf16; OUT32: fp32 | out; ADD: added to                  |
//
// BOXED: blocks and scales as mxfp4_boxes has them.
// H = HIDDEN and I = INNER are multiples of 32. Blocks: (T, H / (16 * ROW_TILES)); threads: 32 * K * SPLIT.
// SPLIT warps multiply a pair, each every SPLIT-th chunk of 128 channels. They request their first weights
// before they wait for the activations. Dynamic shared memory: K * SPLIT times the sums of the rows, then 64
// bytes of zeros, then of each pair its x, in chunks of 256 bytes, then of each pair the rows' scales.
#include "common/activation.cuh"
#include "common/routing.cuh"
#include "sm80/mxfp4_column.cuh"

#ifndef TOP_K
#define TOP_K 8
#endif
#ifndef HIDDEN
#define HIDDEN 2048
#endif
#ifndef INNER
#define INNER 768
#endif
#ifndef SPLIT
#define SPLIT 1
#endif
#ifndef OUT32
#define OUT32 0
#endif
#ifndef ADD
#define ADD 0
#endif

constexpr int K = TOP_K, H = HIDDEN, I = INNER, ROWS = 16 * ROW_TILES;

extern "C" __global__ void __launch_bounds__(32 * K * SPLIT)
    mxfp4_few_down(const u16* act, const unsigned char* blocks, const unsigned char* scales,
                   const u16* biases, const float* biases32, const Id* ids, const int* expert_map,
                   const int* num_tokens, const float* weights, void* out, int P, int E_ids) {
    auto* parts = reinterpret_cast<float (*)[ROWS]>(dynamic_memory());
    const int groups = I / 32, x_units = (I + CHUNK - 1) / CHUNK * 16;
    uint4* zeros = reinterpret_cast<uint4*>(dynamic_memory() + K * SPLIT * ROWS * 4);
    uint4* all_x = zeros + 4;
    const int t = blockIdx.x, warp = threadIdx.x / 32, k = warp / SPLIT, part = warp % SPLIT;
    const int lane = threadIdx.x % 32, pair = t * K + k, row = blockIdx.y * ROWS;
    // ids and weights are safe to read: the predecessor waited for them before it triggered this launch
    if (num_tokens && t >= *num_tokens) return;
    const int e = expert_of(ids, expert_map, pair, P, E_ids);
    const u64 first_row = static_cast<u64>(max(e, 0)) * H + row;
    uint4* x = all_x + k * x_units;
    u64* own_scales = reinterpret_cast<u64*>(all_x + K * x_units) + k * (ROWS / 8 * groups);
    Column column;
#if BOXED
    const int fragment = blockIdx.y * ROW_TILES;
    column.box = Box::of_down(fragment / 8, H);
    column.fragment = fragment % 8;
    const u64 before = (first_row - row + column.box.before) * groups;
    column.weights = blocks + 16 * before;
#else
    column.weights = blocks + (first_row + lane / 4) * (I / 2) + (4 * part + lane % 4) * 16;
    column.high = 8 * (I / 2);
    column.tile = 16 * (I / 2);
#endif
    column.groups = e >= 0 ? groups : 0;
    column.first = part;
    column.step = SPLIT;
    const int thread = part * 32 + lane;  // of those of this pair
#if BOXED
    BoxScales copy{reinterpret_cast<u32*>(own_scales),
                   scales + before,
                   column.box,
                   column.fragment,
                   groups,
                   e >= 0 ? ROWS / 4 * groups : 0,
                   thread,
                   32 * SPLIT,
                   {}};
#else
    ScaleCopy copy{own_scales,
                   reinterpret_cast<const u64*>(scales + first_row * groups),
                   0,
                   ROWS / 8 * groups,
                   e >= 0 ? ROWS / 8 * groups : 0,
                   thread,
                   32 * SPLIT,
                   {}};
#endif
    copy.request();
    column.start();
    const float weight = e >= 0 ? weights[pair] : 0.0f;
    float bias[2 * ROW_TILES];
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; ++i)
        bias[i] =
            BIASED && part == 0 && e >= 0 ? Biases{biases, biases32}[first_row + 8 * i + lane / 4] : 0.0f;
    bool large = copy.keep();
    wait_for_predecessor();
    let_successor_start();
    if (threadIdx.x < 4) zeros[threadIdx.x] = make_uint4(0, 0, 0, 0);
    const u16* of_pair = act + static_cast<u64>(pair) * I;
    ColumnCopy<I, 32 * SPLIT> copy_x;
    if (e >= 0) {
        copy_x.request(of_pair, thread);
        large |= copy_x.keep<true>(x, thread);
    }
    large = __syncthreads_or(large);
    if (large) {
        if (e >= 0) {
            copy_x.request(of_pair, thread);
            copy_x.keep<false>(x, thread);
        }
        __syncthreads();
    }
    float sums[ROW_TILES][2];
    const unsigned char* of_lane =
        reinterpret_cast<const unsigned char*>(own_scales) + (BOXED ? 0 : lane / 4 * groups);
    if (large)
        column.multiply<true>(sums, of_lane, 8 * groups, 16 * groups, x, zeros);
    else
        column.multiply<false>(sums, of_lane, 8 * groups, 16 * groups, x, zeros);
    if (lane % 4 == 0) {
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; ++i)
            parts[warp][8 * i + lane / 4] = e >= 0 ? weight * (sums[i / 2][i % 2] + bias[i]) : 0.0f;
    }
    __syncthreads();
    for (int c = threadIdx.x; c < ROWS; c += 32 * K * SPLIT) {
        const u64 at = static_cast<u64>(t) * H + row + c;
        float total = 0.0f;
#if ADD && OUT32
        total = static_cast<const float*>(out)[at];
#elif ADD
        total = first_of(static_cast<const u16*>(out)[at]);
#endif
#pragma unroll
        for (int i = 0; i < K * SPLIT; ++i) total += parts[i][c];
#if OUT32
        static_cast<float*>(out)[at] = total;
#else
        static_cast<u16*>(out)[at] = static_cast<u16>(pack(total, 0.0f));
#endif
    }
}
