// SPDX-License-Identifier: Apache-2.0
// Rows in the order of channels that mxfp4_mlp multiplies (mxfp4.cuh), padded to whole units with zeros.
//
// | argument | shape                  | dtype | |
// |----------|------------------------|-------|--------------------------|
// | hidden   | [T, H]                 | bf16  | row-major, 16 bytes      |
// | out      | [T, H in units of 128] | bf16  | out; row-major, 16 bytes |
//
// H is a multiple of 8. A thread moves eight channels. Blocks: ceil(T * 16 * units / threads). Predecessor:
// the sort, which runs meanwhile: it let this launch start once its own predecessor, which made hidden, had
// ended. This launch ends after the sort.
#include "sm90/mxfp4.cuh"

extern "C" __global__ void mxfp4_order(const uint4* hidden, u32* out, int T, int H) {
    const u32 eights = (H + UNIT - 1) / UNIT * (UNIT / 8), i = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 row = i / eights, at = i % eights;
    let_successor_start();
    if (row < static_cast<u32>(T)) {
        uint4 from = make_uint4(0, 0, 0, 0);
        if (at * 8 < static_cast<u32>(H)) from = hidden[static_cast<u64>(row) * (H / 8) + at];
        // channels j and 4 + j of the eight, j = 0 .. 3, are neighbours
        const u32 lane = at / 4 % 4, word = at % 4;
        u32* to = out + (static_cast<u64>(row) * eights + at / 16 * 16) * 4 + word * 16 + lane;
        to[0] = __byte_perm(from.x, from.z, 0x5410);
        to[4] = __byte_perm(from.x, from.z, 0x7632);
        to[8] = __byte_perm(from.y, from.w, 0x5410);
        to[12] = __byte_perm(from.y, from.w, 0x7632);
    }
    if (blockIdx.x == 0) wait_for_predecessor();
}
