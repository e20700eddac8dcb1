// SPDX-License-Identifier: Apache-2.0
// K4: Y_perm = X2_perm Wd_e, int4_24 words, fp32 sums, rows sorted by expert.
//
// | argument | shape           | dtype | |
// |----------|-----------------|-------|------------------------------------------------------------|
// | X2_perm  | [M, I]          | bf16  | rows of expert e: OffE[e] .. OffE[e + 1] - 1; 16 bytes     |
// | OffE     | [E + 1]         | int32 |                                                            |
// | Eids     | [U] or null     | int32 | expert of blockIdx.y, -1: none; null: blockIdx.y itself    |
// | w2       | [E, I/64, H, 2] | words | 16 bytes                                                   |
// | Y_perm   | [M, H]          | bf16  | out; may be what K2 read                                   |
//
// H and I are multiples of 64. Grid: (token tiles of NTOK, U or E, ceil(H / 128)), as K2's. TB threads.
// Dynamic shared memory: Xsh [I][NTOK] bf16, I * 16 bytes. One barrier a tile, after its preload. Consumer:
// combine.
//
// A thread has at most 80 registers.
#include "sm80/int4_24_v6/preload.cuh"
#include "sm80/int4_24_v6/sweep.cuh"

extern "C" __global__ void __launch_bounds__(TB, 6)
    k4_w2(const u16* X2_perm, const int* OffE, const int* Eids, const uint4* w2, u16* Y_perm, int H, int I) {
    wait_for_predecessor();
    let_successor_start();
    const TokenTiles tiles(OffE, Eids);
    const Lane at;
    unsigned char* Xsh = dynamic_memory();
    const u64 G2 = I / 64, R = H;
    const uint4* expert = w2 + (tiles.first < tiles.end ? TokenTiles::expert(Eids) : 0) * G2 * R;
    for (int m_base = tiles.first; m_base < tiles.end; m_base += gridDim.x * NTOK) {
        if (m_base != tiles.first) __syncthreads();  // no warp reads the tile before
        preload(Xsh, X2_perm, I, m_base, tiles.end);
        __syncthreads();
        for (int phase = 0; phase < PHASES; ++phase) {
            const int oc_base = blockIdx.z * OTILE_CTA + phase * PHASE_ROWS + at.warp * 16;
            if (oc_base >= H) break;
            const Path paths[1] = {{expert + oc_base + at.group + (at.t & 1) * 8}};
            float c[1][4] = {};
            sweep<1>(c, paths, shared_address(Xsh), G2, R, at);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int m = m_base + at.token(i);
                if (m < tiles.end)
                    Y_perm[static_cast<u64>(m) * H + oc_base + at.row(i)] =
                        static_cast<u16>(pack(c[0][i], 0.0f));
            }
        }
    }
}
