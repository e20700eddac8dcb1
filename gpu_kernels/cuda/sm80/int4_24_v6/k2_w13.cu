// SPDX-License-Identifier: Apache-2.0
// K2: X2_perm = silu(X_perm Wg_e) * (X_perm Wu_e), int4_24 words, fp32 sums, rows sorted by expert.
//
// | argument | shape            | dtype | |
// |----------|------------------|-------|-----------------------------------------------------------------|
// | X_perm   | [M, H]           | bf16  | rows of expert e: OffE[e] .. OffE[e + 1] - 1; 16 bytes          |
// | OffE     | [E + 1]          | int32 |                                                                 |
// | Eids     | [U] or null      | int32 | expert of blockIdx.y, -1: none; null: blockIdx.y itself         |
// | w13      | [E, H/64, 2I, 2] | words | gate row i: i * row_step; its up row: up_rows further; 16 bytes |
// | X2_perm  | [M, I]           | bf16  | out                                                             |
//
// H and I are multiples of 64. Grid: (token tiles of NTOK, U or E, ceil(I / 128)), from T alone; a block
// without a token exits at once. An expert with more than gridDim.x tiles has several a block. TB threads.
// Dynamic shared memory: Xsh [H][NTOK] bf16, H * 16 bytes. One barrier a tile, after its preload. Consumer:
// K4.
//
// A thread has at most 128 registers.
#include "sm80/int4_24_v6/preload.cuh"
#include "sm80/int4_24_v6/sweep.cuh"

extern "C" __global__ void __launch_bounds__(TB, 4)
    k2_w13(const u16* X_perm, const int* OffE, const int* Eids, const uint4* w13, u16* X2_perm, int H, int I,
           int row_step, int up_rows) {
    wait_for_predecessor();
    let_successor_start();
    const TokenTiles tiles(OffE, Eids);
    const Lane at;
    unsigned char* Xsh = dynamic_memory();
    const u64 G2 = H / 64, R = 2 * static_cast<u64>(I);
    const uint4* expert = w13 + (tiles.first < tiles.end ? TokenTiles::expert(Eids) : 0) * G2 * R;
    for (int m_base = tiles.first; m_base < tiles.end; m_base += gridDim.x * NTOK) {
        if (m_base != tiles.first) __syncthreads();  // no warp reads the tile before
        preload(Xsh, X_perm, H, m_base, tiles.end);
        __syncthreads();
        for (int phase = 0; phase < PHASES; ++phase) {
            const int oc_base = blockIdx.z * OTILE_CTA + phase * PHASE_ROWS + at.warp * 16;
            if (oc_base >= I) break;
            const uint4* gate = expert + (oc_base + at.group + (at.t & 1) * 8) * row_step;
            const Path paths[2] = {{gate}, {gate + up_rows}};
            float c[2][4] = {};
            sweep<2>(c, paths, shared_address(Xsh), G2, R, at);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int m = m_base + at.token(i);
                if (m < tiles.end)
                    X2_perm[static_cast<u64>(m) * I + oc_base + at.row(i)] =
                        static_cast<u16>(pack(silu_mul(c[0][i], c[1][i]), 0.0f));
            }
        }
    }
}
