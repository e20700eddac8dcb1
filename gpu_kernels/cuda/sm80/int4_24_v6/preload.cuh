// SPDX-License-Identifier: Apache-2.0
// Monolith-B preload: all channels of a block's tokens in shared memory, Xsh [DIM][NTOK] bf16.
#pragma once

#include "sm80/int4_24_v6/shape.cuh"

// Xsh[k][tok] = X[m_base + tok][k], 0 from row m_end on. X [M, DIM] bf16, row-major. A thread has two
// channels.
__device__ __forceinline__ void preload(unsigned char* Xsh, const u16* X, int DIM, int m_base, int m_end) {
    const u64 stride = static_cast<u64>(DIM) / 2;
    const u32* from = reinterpret_cast<const u32*>(X) + m_base * stride;
    const int valid = min(m_end - m_base, NTOK);
#pragma unroll 4
    for (int k2 = threadIdx.x; k2 < DIM / 2; k2 += TB) {
        u32 both[NTOK];
#pragma unroll
        for (int tok = 0; tok < NTOK; ++tok) both[tok] = tok < valid ? from[tok * stride + k2] : 0;
        uint4* to = reinterpret_cast<uint4*>(Xsh + 2 * k2 * KROW_BYTES);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const u32 which = odd ? 0x7632 : 0x5410;
            to[odd] = make_uint4(__byte_perm(both[0], both[1], which), __byte_perm(both[2], both[3], which),
                                 __byte_perm(both[4], both[5], which), __byte_perm(both[6], both[7], which));
        }
    }
}
