// SPDX-License-Identifier: Apache-2.0
// out[t] (+)= sum over ascending k of weights[t, k] * rows[inverse[t, k]], in fp32: no atomics, one order.
//
// | argument   | shape  | dtype      | |
// |------------|--------|------------|------------------------------------------------------------|
// | rows       | [P, H] | bf16, fp16 | of the grouped product; row-major, 128 bytes; DISCARD: lost |
// | inverse    | [T, K] | int32      | row of each pair; -1: adds nothing, its weight is not used  |
// | weights    | [T, K] | fp32       | |
// | num_tokens | []     | int32 or null | tokens past it are not written                          |
// | out        | [T, H] | as rows, or fp32 (OUT32); 16 bytes | out; ADD: added to                  |
//
// DISCARD: drop rows from L2 after the read, without write-back to memory; H is a multiple of 64.
//
// H is a multiple of 8; K <= 16. Blocks: (T, ceil(H / 8 / threads)); threads: a multiple of 32. A thread
// makes eight columns and reads 16 bytes of each row.
#include "common/copies.cuh"
#include "common/routing.cuh"

#ifndef TOP_K
#define TOP_K 8
#endif
#ifndef OUT32
#define OUT32 0
#endif
#ifndef ADD
#define ADD 0
#endif
#ifndef DISCARD
#define DISCARD 0
#endif

constexpr int K = TOP_K;

extern "C" __global__ void combine(const u16* rows, const int* inverse, const float* weights,
                                   const int* num_tokens, void* out, int H) {
    const int t = blockIdx.x, column = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    const u64 at = static_cast<u64>(t) * H + column;
    const bool here = column < H && !(num_tokens && t >= *num_tokens);
    // all but rows is safe to read: the predecessor waited for it before it triggered this launch
    float sum[8] = {}, weight[K];
    int row[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
        row[k] = here ? inverse[t * K + k] : -1;
        weight[k] = row[k] >= 0 ? weights[t * K + k] : 0.0f;
    }
#if ADD
    if (here) {
#if OUT32
        for (int i = 0; i < 8; ++i) sum[i] = static_cast<const float*>(out)[at + i];
#else
        const uint4 old = *reinterpret_cast<const uint4*>(static_cast<const u16*>(out) + at);
        const u32 was[4] = {old.x, old.y, old.z, old.w};
        for (int i = 0; i < 4; ++i) {
            sum[2 * i] = first_of(was[i]);
            sum[2 * i + 1] = second_of(was[i]);
        }
#endif
    }
#endif
    wait_for_predecessor();
    let_successor_start();
    if (!here) return;
    constexpr int GROUP = K < 8 ? K : 8;  // rows in flight per thread
#pragma unroll
    for (int first = 0; first < K; first += GROUP) {
        uint4 words[GROUP];
#pragma unroll
        for (int k = first; k < first + GROUP && k < K; ++k)
            if (row[k] >= 0)
                words[k - first] =
                    *reinterpret_cast<const uint4*>(rows + static_cast<u64>(row[k]) * H + column);
#pragma unroll
        for (int k = first; k < first + GROUP && k < K; ++k) {
            if (row[k] < 0) continue;
            const uint4 word = words[k - first];
            const u32 pairs[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[2 * i] += weight[k] * first_of(pairs[i]);
                sum[2 * i + 1] += weight[k] * second_of(pairs[i]);
            }
        }
    }
#if DISCARD
    __syncwarp();
    if (threadIdx.x % 8 == 0)
        for (int k = 0; k < K; ++k)
            if (row[k] >= 0) discard_line(rows + static_cast<u64>(row[k]) * H + column, sum[0]);
#endif
#if OUT32
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(out) + at);
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
#else
    *reinterpret_cast<uint4*>(static_cast<u16*>(out) + at) =
        make_uint4(pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
#endif
}
