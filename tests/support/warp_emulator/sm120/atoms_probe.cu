// SPDX-License-Identifier: Apache-2.0
// Each atom of sm120/atoms.cuh alone: a warp a block.
//
// | argument | shape        |                                                                                   |
// |----------|--------------|-----------------------------------------------------------------------------------|
// | words    | [B, 32, 8]   | of each lane: a[4], b[2], scale_a, scale_b; LOAD: 1 KiB of shared memory          |
// | rows     | [B, 32]      | LOAD: the address that a lane gives                                               |
// | sums     | [B, 32, 4]   | in and out; LOAD: words                                                           |
// | atom     |              | byte of the scales; + 4: A is e2m1; + 8: both are, packed; 16: LOAD                |
#include "sm120/atoms.cuh"

extern "C" __global__ void atoms_probe(const u32* words, const u32* rows, float* sums, int atom) {
    const int lane = threadIdx.x, at = blockIdx.x * 32 + lane;
    const u32* mine = words + 8 * at;
    if (atom == 16) {
        u32* memory = reinterpret_cast<u32*>(dynamic_memory());
        for (int i = 0; i < 8; ++i) memory[8 * lane + i] = mine[i];
        __syncwarp();
        u32 loaded[4];
        load_fp4_matrices(loaded, rows[at]);
        for (int i = 0; i < 4; ++i) reinterpret_cast<u32*>(sums)[4 * at + i] = loaded[i];
        return;
    }
    const u32 a[4] = {mine[0], mine[1], mine[2], mine[3]};
    float made[4];
    for (int i = 0; i < 4; ++i) made[i] = sums[4 * at + i];
#define ATOM(NUMBER, CALL)                                 \
    case NUMBER:                                           \
        CALL(made, a, mine[4], mine[5], mine[6], mine[7]); \
        break
    switch (atom) {
        ATOM(0, (multiply_scaled<false, 0>));
        ATOM(1, (multiply_scaled<false, 1>));
        ATOM(2, (multiply_scaled<false, 2>));
        ATOM(3, (multiply_scaled<false, 3>));
        ATOM(4, (multiply_scaled<true, 0>));
        ATOM(5, (multiply_scaled<true, 1>));
        ATOM(6, (multiply_scaled<true, 2>));
        ATOM(7, (multiply_scaled<true, 3>));
        ATOM(8, (multiply_scaled_fp4<0>));
        ATOM(10, (multiply_scaled_fp4<2>));
    }
    for (int i = 0; i < 4; ++i) sums[4 * at + i] = made[i];
}
