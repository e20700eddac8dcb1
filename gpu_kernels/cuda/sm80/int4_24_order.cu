// SPDX-License-Identifier: Apache-2.0
// Rows in the order of channels of lanes that load B (int4_24_rows.cuh).
//
// | argument | shape  | dtype | |
// |----------|--------|-------|----------------------------|
// | hidden   | [T, H] | bf16  | row-major, 16 bytes        |
// | out      | [T, H] | bf16  | out; row-major, 16 bytes   |
//
// H is a multiple of 64; groups = T * H / 32. A thread makes 64 bytes. Blocks: ceil(groups / threads).
#include "sm80/int4_24_rows.cuh"

extern "C" __global__ void int4_24_order(const uint4* hidden, uint4* out, int groups) {
    const int group = blockIdx.x * blockDim.x + threadIdx.x;
    wait_for_predecessor();
    let_successor_start();
    if (group >= groups) return;
    u32 words[16];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4 four = hidden[static_cast<u64>(group) * 4 + i];
        words[word_of(8 * i)] = four.x;
        words[word_of(8 * i + 2)] = four.y;
        words[word_of(8 * i + 4)] = four.z;
        words[word_of(8 * i + 6)] = four.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        out[static_cast<u64>(group) * 4 + i] =
            make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
}
