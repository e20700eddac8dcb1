// SPDX-License-Identifier: Apache-2.0
// Rows in the order of channels that products of int4_24 take: of lanes that load B (int4_24_rows.cuh), or
// with K_ORDER of k, as sm90/int4_24_wide_mlp reads them.
//
// | argument | shape  | dtype | |
// |----------|--------|-------|----------------------------|
// | hidden   | [T, H] | bf16  | row-major, 16 bytes        |
// | out      | [T, H] | bf16  | out; row-major, 16 bytes   |
//
// H is a multiple of 64; groups = T * H / 32. A thread makes 64 bytes. Blocks: ceil(groups / threads).
#include "sm80/int4_24_rows.cuh"

#ifndef K_ORDER
#define K_ORDER 0
#endif

// Where a channel pair of 32 channels goes, of 16 words.
__device__ __forceinline__ constexpr int place_of_pair(int channel) {
    return K_ORDER ? channel / 8 * 2 + channel / 4 % 2 * 8 + channel / 2 % 2 : word_of(channel);
}

extern "C" __global__ void int4_24_order(const uint4* hidden, uint4* out, int groups) {
    const int group = blockIdx.x * blockDim.x + threadIdx.x;
    wait_for_predecessor();
    let_successor_start();
    if (group >= groups) return;
    u32 words[16];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4 four = hidden[static_cast<u64>(group) * 4 + i];
        words[place_of_pair(8 * i)] = four.x;
        words[place_of_pair(8 * i + 2)] = four.y;
        words[place_of_pair(8 * i + 4)] = four.z;
        words[place_of_pair(8 * i + 6)] = four.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        out[static_cast<u64>(group) * 4 + i] =
            make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
}
