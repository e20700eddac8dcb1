// SPDX-License-Identifier: Apache-2.0
// Rows in fp16, in the order of channels of lanes that load B (int4_24_rows.cuh).
//
// | argument | shape  | dtype |                                           |
// |----------|--------|-------|-------------------------------------------|
// | hidden   | [T, H] | bf16  | row-major, 16 bytes                       |
// | out      | [T, H] | fp16  | out; row-major, 16 bytes                  |
// | powers   | [T]    | fp32  | out; what sums of a row are multiplied by |
//
// H is a multiple of 64. Blocks: T, of a multiple of 32 threads, up to 1024.
// Shared memory: 4 bytes a warp.
#include "common/copies.cuh"
#include "sm80/int4_24_rows.cuh"
#include "sm80/row_powers.cuh"

extern "C" __global__ void int4_24_fp16_rows(const u16* hidden, uint4* out, float* powers, int H) {
    u32* found = reinterpret_cast<u32*>(dynamic_memory());
    const int token = blockIdx.x, warps = blockDim.x / 32, units = H / 8;
    wait_for_predecessor();
    let_successor_start();
    const u16* row = hidden + static_cast<u64>(token) * H;
    u32 most = 0;
    for (int i = threadIdx.x; i < units; i += blockDim.x)
        most = most_of(most, reinterpret_cast<const uint4*>(row)[i]);
    most = most_of_lanes(most);
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = most;
    __syncthreads();
    for (int i = 0; i < warps; ++i) most = max(most, found[i]);
    const RowPower power(most);
    if (threadIdx.x == 0) powers[token] = power.down;
    for (int i = threadIdx.x; i < units; i += blockDim.x) {
        const uint2* four = reinterpret_cast<const uint2*>(row + i / 4 * 32 + i % 4 * 4);
        const uint2 a = four[0], b = four[4];  // 16 channels further on
        out[static_cast<u64>(token) * units + i] = power.unit(make_uint4(a.x, b.x, a.y, b.y));
    }
}
