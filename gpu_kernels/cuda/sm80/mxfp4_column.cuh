// A warp's product of 16 * ROW_TILES rows of MXFP4 weights and one token.
#pragma once

#include "common/copies.cuh"
#include "sm80/mxfp4.cuh"

#ifndef ROW_TILES
#define ROW_TILES 1
#endif
#ifndef UNROLL
#define UNROLL 6  // chunks of 128 channels in flight
#endif

// x, eight channels at a time, as B: chunk c, word i of lane t at unit 16 * c + 4 * i + t. Zeros behind the
// last channel.
__device__ __forceinline__ void load_column(uint4* x, const u16* from, int channels, int thread,
                                            int threads) {
    constexpr int AHEAD = 4;
    const int units = (channels + CHUNK - 1) / CHUNK * 16;
    for (int first = thread; first < units; first += AHEAD * threads) {
        uint4 words[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const int i = first + k * threads;
            words[k] = 8 * i < channels ? reinterpret_cast<const uint4*>(from)[i] : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const int i = first + k * threads;
            if (i < units) x[i / 16 * 16 + i % 4 * 4 + i / 4 % 4] = pairs_of(words[k]);
        }
    }
}

// Scales of one or two runs of rows, each of `units` times 8 bytes, which begin at multiples of 8 bytes.
struct ScaleCopy {
    static constexpr int AHEAD = 2;
    u64* to;
    const u64* from;
    u64 to_run;  // from a run to the next, in units
    int units, all, thread, threads;
    u64 held[AHEAD];

    __device__ __forceinline__ u64 at(int i) const {
        return i < all ? from[i < units ? i : to_run + i - units] : 0;
    }
    __device__ __forceinline__ void request() {
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) held[k] = at(thread + k * threads);
    }
    // Whether a scale is large.
    __device__ __forceinline__ bool keep() {
        u64 any = 0;
#pragma unroll
        for (int k = 0; k < AHEAD; ++k)
            if (thread + k * threads < all) {
                to[thread + k * threads] = held[k];
                any |= held[k];
            }
        for (int i = thread + AHEAD * threads; i < all; i += threads) {
            to[i] = at(i);
            any |= to[i];
        }
        return is_large(static_cast<u32>(any >> 32) | static_cast<u32>(any));
    }
};

struct Column {
    const unsigned char*
        weights;      // of row lane / 4 of tile 0, this lane's 16 bytes of this warp's first chunk
    u32 high, tile;   // bytes to row lane / 4 + 8, and to the next tile
    int groups;       // of 32 channels; 0: no expert
    int first, step;  // this warp's first chunk, and from one to the next
    uint4 words[UNROLL][ROW_TILES][2];

    // Request chunk i of this warp.
    __device__ __forceinline__ void load(int i, uint4 (&to)[ROW_TILES][2]) const {
        const int group = 4 * (first + step * i) + static_cast<int>(threadIdx.x % 4);
        const bool here = group < groups;
        const unsigned char* from = weights + static_cast<u64>(step * i) * 64;
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                to[m][h] = here ? load_once<true>(reinterpret_cast<const uint4*>(from + m * tile + h * high))
                                : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void start() {
#pragma unroll
        for (int j = 0; j < UNROLL; ++j) load(j, words[j]);
    }

    // What a chunk takes from shared memory.
    struct Operands {
        uint4 b[4];
        u32 scales[ROW_TILES][2];
    };
    __device__ __forceinline__ Operands operands(int c, const unsigned char* scales, int high_scales,
                                                 int tile_scales, const uint4* x) const {
        const int t = threadIdx.x % 4, group = min(4 * c + t, groups - 1);
        const uint4* from = x + group / 4 * 16 + t;
        Operands out;
#pragma unroll
        for (int i = 0; i < 4; ++i) out.b[i] = from[4 * i];
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) out.scales[m][h] = scales[m * tile_scales + h * high_scales + group];
        return out;
    }

    template <bool LARGE>
    __device__ __forceinline__ static void multiply_chunk(float (&sums)[ROW_TILES][2][4],
                                                          const uint4 (&rows)[ROW_TILES][2],
                                                          const Operands& with) {
        Factor by[ROW_TILES][2];
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) by[m][h] = Factor::of<LARGE>(with.scales[m][h]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m)
                multiply_word<LARGE, 1>(&sums[m][i % 2], word_of(rows[m][0], i), word_of(rows[m][1], i),
                                        by[m][0], by[m][1], &with.b[i]);
    }

    // scales: of this lane's row of tile 0; high_scales, tile_scales: bytes to other rows. sums of rows lane
    // / 4 and lane / 4 + 8. LARGE: whether a scale of the block is large.
    template <bool LARGE>
    __device__ __forceinline__ void multiply(float (&sums)[ROW_TILES][2], const unsigned char* scales,
                                             int high_scales, int tile_scales, const uint4* x) {
        float all[ROW_TILES][2][4] = {};
        if (4 * first < groups) {
            Operands next = operands(first, scales, high_scales, tile_scales, x);
            for (int i = 0; 4 * (first + step * i) < groups; i += UNROLL)
#pragma unroll
                for (int j = 0; j < UNROLL; ++j) {
                    const int c = first + step * (i + j);
                    if (4 * c >= groups) break;
                    const Operands now = next;
                    next = operands(c + step, scales, high_scales, tile_scales, x);
                    multiply_chunk<LARGE>(all, words[j], now);
                    load(i + j + UNROLL, words[j]);
                }
        }
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
            sums[m][0] = all[m][0][0] + all[m][1][0];
            sums[m][1] = all[m][0][2] + all[m][1][2];
        }
    }
};
