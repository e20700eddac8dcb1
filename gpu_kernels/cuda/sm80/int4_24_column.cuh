// Rows of int4_24 words times one column, by a warp alone: it copies what it multiplies, and waits for no
// other.
//
// A warp has ROW_TILES products of 16 rows, over some pairs of slabs of 64 channels (int4_24_quad.cuh). Its
// ring in shared memory holds DEPTH pairs of slabs of its rows: 16 bytes a row and slab.
#pragma once

#include "common/copies.cuh"
#include "sm80/int4_24_quad.cuh"

#ifndef ROW_TILES
#define ROW_TILES 2
#endif
#ifndef DEPTH
#define DEPTH 4
#endif

constexpr int SLAB_ROWS = 16 * ROW_TILES;
constexpr int SLAB_BYTES =
    SLAB_ROWS * 16 + 64;  // so that lanes that load words of both slabs touch other banks
constexpr int RING_BYTES = DEPTH * 2 * SLAB_BYTES;
constexpr int ZERO_BYTES = 64;  // in front of a column
static_assert(ROW_TILES == 2 || ROW_TILES == 4, "a lane copies one row of a slab, or two");

// A column of `channels` channels, by threads first, first + step, ...
__device__ __forceinline__ void load_column(uint4* to, const u16* from, int channels, int first, int step) {
    for (int i = first; i < channels / 8; i += step) to[i] = reinterpret_cast<const uint4*>(from)[i];
}
__device__ __forceinline__ void clear_zeros(uint4* zeros, int first) {
    if (first < ZERO_BYTES / 16) zeros[first] = make_uint4(0, 0, 0, 0);
}

struct Column {
    const unsigned char* rows;  // that this lane copies, of the next slab
    u32 slab_bytes;             // from a slab to the next
    u32 pair_bytes;             // from a pair of slabs of this warp to its next
    u32 second;                 // bytes to the second row of this lane
    int left;                   // slabs from the next pair's first on
    int step;                   // slabs from a pair of this warp to its next
    const unsigned char* ring;

    // 16 bytes of a lane's rows and of each slab, to stage `at`. They lie in the order of the products: row l
    // of each 32, low ones of a product first.
    __device__ __forceinline__ void request(int at) {
        const u32 to = shared_address(ring) + at * 2 * SLAB_BYTES + threadIdx.x % 32 * 16;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (left > i) {
                copy_16(to + i * SLAB_BYTES, rows + i * slab_bytes);
                if (ROW_TILES == 4) copy_16(to + i * SLAB_BYTES + 512, rows + i * slab_bytes + second);
            }
        rows += pair_bytes;
        left -= step;
        copies_commit();
    }
    __device__ __forceinline__ void start() {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) request(i);
    }

    // sums: of rows l / 4 and l / 4 + 8 of each product, in all lanes of a quad. zeros: ZERO_BYTES of zeros,
    // then the column; first: slab of this warp's first pair, of `slabs`. Of a product's columns, 2g hold
    // group g.
    __device__ __forceinline__ void multiply(float (&sums)[ROW_TILES][2], const unsigned char* zeros,
                                             int first, int slabs, u32 zero) {
        const QuadDecoder decoder(zero);
        const int lane = threadIdx.x % 32, t = lane % 4, group = lane / 8;
        const bool is_column = lane / 4 % 2 == 0, is_low = is_column && group == t / 2;
        const bool is_high = is_column && group == t / 2 + 2;
        const unsigned char* own = zeros + ZERO_BYTES + first * 128 + group * 64 + t % 2 * 8;
        const unsigned char *low_x = is_low ? own : zeros, *high_x = is_high ? own : zeros;
        const int low_step = is_low ? step * 128 : 0, high_step = is_high ? step * 128 : 0;
        const unsigned char* from = ring + t / 2 * SLAB_BYTES + lane / 4 * 16 + t % 2 * 8;
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) sums[m][0] = sums[m][1] = 0.0f;
        for (int slab = first; slab < slabs; slab += DEPTH * step) {
#pragma unroll
            for (int at = 0; at < DEPTH; ++at) {
                const int here = slabs - (slab + at * step);
                if (here <= 0) break;
                copies_wait<DEPTH - 1>();
                __syncwarp();
                if (here == 1) high_x = zeros;
                u32 b[1][4][4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j)  // words of one register each: b takes four in a row
                        b[0][i][j] =
                            *reinterpret_cast<const u32*>((j % 2 ? high_x : low_x) + i * 16 + j / 2 * 4);
                low_x += low_step;
                high_x += high_step;
#pragma unroll
                for (int m = 0; m < ROW_TILES; m += 2) {
                    QuadDecoder::Fragment of[2];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const unsigned char* words = from + at * 2 * SLAB_BYTES + (m + i) * 256;
                        of[i] = decoder.decode(*reinterpret_cast<const uint2*>(words),
                                               *reinterpret_cast<const uint2*>(words + 128));
                    }
                    float products[2][1][4];
                    multiply_quads(products, of, b);
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (here > 1 || t < 2) {
                            sums[m + i][0] = fmaf(products[i][0][0], of[i].low, sums[m + i][0]);
                            sums[m + i][1] = fmaf(products[i][0][2], of[i].high, sums[m + i][1]);
                        }
                }
                __syncwarp();
                request(at);
            }
        }
        copies_wait<0>();
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float sum = sums[m][i];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                sums[m][i] = sum * INTEGERS;
            }
    }
};
