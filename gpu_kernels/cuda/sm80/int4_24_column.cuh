// Rows of int4_24 words times one column, by a warp alone: it copies what it multiplies, and waits for no
// other.
//
// A warp has ROW_TILES products of 16 rows, over some slabs of 64 channels. Its ring in shared memory holds
// DEPTH slabs of its rows: 16 bytes a row.
#pragma once

#include "common/copies.cuh"
#include "sm80/int4_24_rows.cuh"

#ifndef ROW_TILES
#define ROW_TILES 2
#endif
#ifndef DEPTH
#define DEPTH 8
#endif

constexpr int SLAB_ROWS = 16 * ROW_TILES, SLAB_BYTES = SLAB_ROWS * 16, RING_BYTES = DEPTH * SLAB_BYTES;
static_assert(ROW_TILES == 2 || ROW_TILES == 4, "a lane copies one row, or two");

// The column, of `channels` channels, in the order of B; threads first, first + step, ...
__device__ __forceinline__ void load_column(u32* to, const u16* from, int channels, int first, int step) {
    for (int i = first; i < channels / 8; i += step) {
        const uint4 words = reinterpret_cast<const uint4*>(from)[i];
        u32* group = to + i / 4 * 16;
        group[word_of(i % 4 * 8)] = words.x;
        group[word_of(i % 4 * 8 + 2)] = words.y;
        group[word_of(i % 4 * 8 + 4)] = words.z;
        group[word_of(i % 4 * 8 + 6)] = words.w;
    }
}

struct Column {
    const unsigned char* rows;  // that this lane copies, of the next slab
    u32 slab_bytes;             // from a slab to the next of this warp
    u32 second;                 // bytes to the second row of this lane
    int slabs;                  // that are not requested yet
    const unsigned char* ring;

    // 16 bytes of a lane's rows, to stage `at`. They lie in the order of the products: row l of each 32, low
    // ones of a product first.
    __device__ __forceinline__ void request(int at) {
        if (slabs > 0) {
            const u32 to = shared_address(ring) + at * SLAB_BYTES + threadIdx.x % 32 * 16;
            copy_16(to, rows);
            if (ROW_TILES == 4) copy_16(to + 512, rows + second);
            rows += slab_bytes;
            --slabs;
        }
        copies_commit();
    }
    __device__ __forceinline__ void start() {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) request(i);
    }

    // sums: of rows l / 4 and l / 4 + 8 of each product, in lanes l % 4 = 0. column: of the first slab; to
    // the next one, `step` times 16 bytes. All columns of a product are this one.
    __device__ __forceinline__ void multiply(float (&sums)[ROW_TILES][2], const uint4* column, int step,
                                             int count, u32 zero) {
        const Decoder decoder(zero);
        const int lane = threadIdx.x % 32;
        column += lane % 4;
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) sums[m][0] = sums[m][1] = 0.0f;
        for (int first = 0; first < count; first += DEPTH) {
#pragma unroll
            for (int at = 0; at < DEPTH; ++at) {
                if (first + at >= count) break;
                copies_wait<DEPTH - 1>();
                __syncwarp();
                const uint4* words = reinterpret_cast<const uint4*>(ring + at * SLAB_BYTES) + lane / 4;
                u32 b[2][4];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint4 four = column[half * 4];
                    b[half][0] = four.x;
                    b[half][1] = four.y;
                    b[half][2] = four.z;
                    b[half][3] = four.w;
                }
                column += step;
#pragma unroll
                for (int m = 0; m < ROW_TILES; ++m) {
                    const uint4 low = words[16 * m], high = words[16 * m + 8];
                    const auto even = decoder.decode(low.x, low.y, high.x, high.y);
                    const auto odd = decoder.decode(low.z, low.w, high.z, high.w);
                    float products[4];
                    multiply_integers(products, even, b[0]);
                    sums[m][0] = fmaf(products[0], even.low, sums[m][0]);
                    sums[m][1] = fmaf(products[2], even.high, sums[m][1]);
                    multiply_integers(products, odd, b[1]);
                    sums[m][0] = fmaf(products[0], odd.low, sums[m][0]);
                    sums[m][1] = fmaf(products[2], odd.high, sums[m][1]);
                }
                __syncwarp();
                request(at);
            }
        }
        copies_wait<0>();
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
            sums[m][0] *= INTEGERS;
            sums[m][1] *= INTEGERS;
        }
    }
};
