// SPDX-License-Identifier: Apache-2.0
// Hidden in fp16, in the order that sm90/int4_24_mlp reads.
//
// | argument | shape               | dtype |                                                   |
// |----------|---------------------|-------|---------------------------------------------------|
// | hidden   | [T, H]              | bf16  | row-major, 16 bytes                               |
// | out      | [T, padded(H)]      | fp16  | out; zeros from channel H on; 16 bytes            |
// | powers   | [T]                 | fp32  | out; what sums of a row are multiplied by         |
//
// Blocks: T, of a multiple of 32 threads, up to 1024.
#include "sm90/int4_24_fp16.cuh"

extern "C" __global__ void int4_24_rows(const u16* hidden, uint4* out, float* powers, int H) {
    const u32 found = shared_address(dynamic_memory());
    const int token = blockIdx.x, warps = blockDim.x / 32;
    wait_for_predecessor();
    let_successor_start();
    const u16* row = hidden + static_cast<u64>(token) * H;
    u32 most = 0;
    for (int i = threadIdx.x; i < H / 8; i += blockDim.x)
        most = most_of(most, reinterpret_cast<const uint4*>(row)[i]);
    most = most_of_lanes(most);
    if (threadIdx.x % 32 == 0) store_float(found + threadIdx.x / 32 * 4, __uint_as_float(most));
    __syncthreads();
    for (int i = 0; i < warps; ++i) most = max(most, load_word(found + 4 * i));
    const RowPower power(most);
    if (threadIdx.x == 0) powers[token] = power.down;
    const int units = padded(H) / UNIT_CHANNELS;
    for (int i = threadIdx.x; i < units; i += blockDim.x) {
        const int channel = i / UNITS * BLOCK_CHANNELS + i % 2 * HALF_CHANNELS + first_of(i % UNITS / 2);
        uint2 a = make_uint2(0, 0), b = a;
        if (channel < H) {  // H is a multiple of 64
            a = *reinterpret_cast<const uint2*>(row + channel);
            b = *reinterpret_cast<const uint2*>(row + channel + 32);
        }
        out[static_cast<u64>(token) * units + i] = power.unit(make_uint4(a.x, a.y, b.x, b.y));
    }
}
