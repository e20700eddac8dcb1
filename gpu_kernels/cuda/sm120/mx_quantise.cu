// SPDX-License-Identifier: Apache-2.0
// Rows as MXFP8, or MXFP4 where PACKED is 1: a number for each channel, a scale for each 32.
//
// | argument  | shape          | dtype                |                                                            |
// |-----------|----------------|----------------------|------------------------------------------------------------|
// | rows      | [R, C]         | bf16; FROM32: fp32   | row-major, 16 bytes                                        |
// | tiles     | [bound]        | Tile or null         | of routing_sort: only the rows that it sorted              |
// | num_tiles | [1]            | int32 or null        |                                                            |
// | values    | [R, C]         | e4m3, out            | 8 bytes; PACKED: [R, C / 2], channel 2i in the low bits    |
// | scales    | [R, S]         | ue8m0, out           | S: C / 32 rounded up to 4; zeros after the last            |
//
// C is a multiple of 32. A thread makes eight channels; four threads share a scale. Threads: 256 a block.
// Producers: the caller's hidden; mxfp4_product without a fused epilogue. Consumer: mxfp4_product.
#include "common/routing.cuh"
#include "sm120/mx.cuh"

#ifndef FROM32
#define FROM32 0
#endif

extern "C" __global__ void mx_quantise(const void* rows, const Tile* tiles, const int* num_tiles, u8* values,
                                       u8* scales, int R, int C) {
    wait_for_predecessor();
    let_successor_start();
    if (tiles) {
        const int n = *num_tiles;
        R = n ? tiles[n - 1].first + tiles[n - 1].rows : 0;
    }
    const u32 i = blockIdx.x * 256 + threadIdx.x, chunks = C / 8;
    const int row = i / chunks, chunk = i % chunks;
    const bool here = row < R;
    float x[8] = {};
    if (here) {
#if FROM32
        const float4* from = static_cast<const float4*>(rows) + 2 * static_cast<u64>(i);
        const float4 low = from[0], high = from[1];
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
#else
        const uint4 words = static_cast<const uint4*>(rows)[i];
        const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            x[2 * n] = first_of(pairs[n]);
            x[2 * n + 1] = second_of(pairs[n]);
        }
#endif
    }
    u32 most = 0;
#pragma unroll
    for (float value : x) most = max(most, magnitude(value));
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    most = max(most, __shfl_xor_sync(~0u, most, 2));
    if (!here) return;

    const u32 scale = scale_of(most);
    const float inverse = inverse_of(scale);
    const bool good = scale != NAN_SCALE;
#pragma unroll
    for (float& value : x) value = good ? value * inverse : 0.0f;
#if PACKED
    u32 codes = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) codes |= to_e2m1(x[n]) << 4 * n;
    reinterpret_cast<u32*>(values)[i] = codes;
#else
    reinterpret_cast<uint2*>(values)[i] = make_uint2(pack_e4m3(x[0], x[1]) | pack_e4m3(x[2], x[3]) << 16,
                                                     pack_e4m3(x[4], x[5]) | pack_e4m3(x[6], x[7]) << 16);
#endif
    if (chunk % 4) return;
    const int stride = scale_stride(C), group = chunk / 4;
    u8* to = scales + static_cast<u64>(row) * stride;
    to[group] = scale;
    if (group == C / GROUP - 1)
        for (int n = group + 1; n < stride; ++n) to[n] = 0;
}
