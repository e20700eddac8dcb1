// SPDX-License-Identifier: Apache-2.0
// Rows of int4_24 words times one column, by a warp alone, words straight from memory to registers.
//
// A warp has TILES products of 16 rows, over some pairs of slabs of 64 channels (sm90/int4_24_quad.cuh).
// A lane's word of a pair is that of slab t / 2, half t % 2.
//
// In shared memory a group of 32 channels of a column has four 16 bytes: even channel pairs of chunks 0, 4,
// 1, 5, then of 2, 6, 3, 7; then odd pairs of both.
#pragma once

#include "common/copies.cuh"
#include "sm90/int4_24_quad.cuh"

#ifndef TILES
#define TILES 2
#endif
#ifndef AHEAD
#define AHEAD 4
#endif

constexpr int PAIR_BYTES = 256;  // of a column: a pair of slabs

// Eight channels, the i-th of a column.
__device__ __forceinline__ void put_channels(unsigned char* column, int i, uint4 four) {
    const int q = i % 4;  // chunks 2q and 2q + 1
    u32* at = reinterpret_cast<u32*>(column + i / 4 * 64) + q % 2 * 4 + q / 2;
    at[0] = four.x;
    at[8] = four.y;
    at[2] = four.z;
    at[10] = four.w;
}

// COUNT pairs of this warp, STRIDE pairs apart, of SLABS slabs of WIDTH rows. HALF: the last product has its
// low rows alone; the sums of its high ones are anything.
template <int COUNT, int STRIDE, int SLABS, int WIDTH, bool HALF = false>
struct Column {
    static constexpr bool WHOLE = COUNT * STRIDE * 2 == SLABS;  // no pair of any warp is cut
    static constexpr int STEP = STRIDE * 2 * WIDTH * 16;
    uint2 low[AHEAD][TILES], high[AHEAD][TILES];
    const unsigned char* rows;  // this lane's low row of product 0, in slab 0 of the expert, or of slab t / 2
                                // of its first pair
    int first;
    u32 to_high, to_tile;

    __device__ __forceinline__ void request(int at, int i) {
        const unsigned char* from = rows;
        if (WHOLE) {
            from += static_cast<u64>(static_cast<u32>(i * STEP));
        } else {
            const int slab = min(2 * (first + i * STRIDE) + static_cast<int>(threadIdx.x % 4 / 2), SLABS - 1);
            from += static_cast<u64>(slab) * (WIDTH * 16);
        }
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            low[at][m] = load_once_8(from + m * to_tile);
            high[at][m] = HALF && m == TILES - 1 ? low[at][m] : load_once_8(from + m * to_tile + to_high);
        }
    }
    // low_row: of this lane, of the expert's words
    __device__ __forceinline__ void start(const unsigned char* words, int low_row, int warp, u32 high_bytes,
                                          u32 tile_bytes) {
        const int t = threadIdx.x % 4;
        first = warp;
        to_high = high_bytes;
        to_tile = tile_bytes;
        rows = words + low_row * 16 + t % 2 * 8;
        if (WHOLE) rows += static_cast<u64>(2 * first + t / 2) * (WIDTH * 16);
#pragma unroll
        for (int a = 0; a < AHEAD; ++a)
            if (a < COUNT) request(a, a);
    }

    // column: COUNT * STRIDE pairs.
    __device__ __forceinline__ void multiply(float (&sums)[TILES][2], const unsigned char* column, u32 zero) {
        const QuadDecoder decoder(zero);
        const int lane = threadIdx.x % 32, t = lane % 4, group = lane / 8;
        const OwnColumns own(zero, lane / 4 % 2 == 0);
        const unsigned char* x = column + first * PAIR_BYTES + group * 64 + t % 2 * 32;
#pragma unroll
        for (int m = 0; m < TILES; ++m) sums[m][0] = sums[m][1] = 0.0f;
#pragma unroll 1
        for (int i = 0; i < COUNT; i += AHEAD) {
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                if (COUNT % AHEAD && i + a >= COUNT) break;
                u32 b[4][4];
                own.take(b, x);
                x += STRIDE * PAIR_BYTES;
#pragma unroll
                for (int m = 0; m < TILES; ++m) {
                    const QuadDecoder::Fragment of[1] = {decoder.decode(low[a][m], high[a][m])};
                    float products[1][4];
                    multiply_quads(products, of, b);
                    sums[m][0] = fmaf(products[0][0], of[0].low, sums[m][0]);
                    sums[m][1] = fmaf(products[0][2], of[0].high, sums[m][1]);
                }
                if (i + a + AHEAD < COUNT) request(a, i + a + AHEAD);
            }
        }
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float sum = sums[m][i];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                sums[m][i] = sum * INTEGERS;
            }
    }
};
