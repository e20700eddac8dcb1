// SPDX-License-Identifier: Apache-2.0
// A warp's product of 16 * ROW_TILES rows of MXFP4 weights and one token.
//
// The token fills one column of eight, so the columns keep the scale groups apart: lane t of a quad has group
// t of a chunk, and column 2t of B holds the token's channels of that group, zeros elsewhere. Then lane t's
// sums of columns 2t are of its own group, and take that group's scales: one fma a row and chunk instead of a
// multiplication for two weights. Weights are times 2^-126 and the token times 2^96, so the scale is times
// 2^30. A block that finds a large scale, or a channel of 2^32 or more, multiplies each weight by its scale.
#pragma once

#include "common/copies.cuh"
#include "sm80/mxfp4.cuh"
#include "sm80/mxfp4_boxes.cuh"

#ifndef ROW_TILES
#define ROW_TILES 1
#endif
#ifndef UNROLL
#define UNROLL 6  // chunks of 128 channels in flight
#endif

constexpr u32 UP = 0x6f806f80u;  // 2^96, twice

// Whether one of two bf16 is infinite or NaN.
__device__ __forceinline__ bool is_beyond(u32 two) {
    return (((two & 0x7f807f80u) + 0x00800080u) & 0x80008000u) != 0;
}

// x, eight channels at a time, as B: chunk c, word i of lane t at unit 16 * c + 4 * t + i. Zeros behind the
// last channel. THREADS copy it: all are requested, then kept.
template <int CHANNELS, int THREADS>
struct ColumnCopy {
    static constexpr int UNITS = (CHANNELS + CHUNK - 1) / CHUNK * 16, EACH = (UNITS + THREADS - 1) / THREADS;
    uint4 held[EACH];

    __device__ __forceinline__ void request(const u16* from, int thread) {
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const int i = thread + k * THREADS;
            held[k] = 8 * i < CHANNELS ? reinterpret_cast<const uint4*>(from)[i] : make_uint4(0, 0, 0, 0);
        }
    }
    // SCALED: times 2^96; returns whether a channel is beyond that.
    template <bool SCALED>
    __device__ __forceinline__ bool keep(uint4* x, int thread) const {
        bool beyond = false;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const int i = thread + k * THREADS;
            uint4 pairs = pairs_of(held[k]);
            if (SCALED) {
                u32* word = &pairs.x;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    word[j] = multiply_add_bf16x2(word[j], UP, 0x80008000u);
                    beyond |= is_beyond(word[j]);
                }
            }
            if (i < UNITS) x[i] = pairs;
        }
        return beyond;
    }
};

#if !BOXED
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
#else
// Scales of ROW_TILES fragments of a box: of each its stages in turn, in words.
struct BoxScales {
    static constexpr int AHEAD = 4;
    u32* to;
    const unsigned char* from;  // of the box
    Box box;
    int fragment, groups, all, thread, threads;  // all: words
    u32 held[AHEAD];

    __device__ __forceinline__ u32 at(int i) const {
        if (i >= all) return 0;
        const int each = box.rows * groups / 4, m = ROW_TILES == 1 ? 0 : i / each, rest = i - m * each;
        const int stage = box.whole ? rest / 32 : rest / (2 * box.rows), word = rest - stage * 2 * box.rows;
        const int wide = min(STAGE_GROUPS, groups - stage * STAGE_GROUPS);
        const int byte = stage * box.all() * STAGE_GROUPS + (fragment + m) * box.rows * wide + 4 * word;
        return *reinterpret_cast<const u32*>(from + byte);
    }
    __device__ __forceinline__ void request() {
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) held[k] = at(thread + k * threads);
    }
    // Whether a scale is large.
    __device__ __forceinline__ bool keep() {
        u32 any = 0;
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
        return is_large(any);
    }
};
#endif

struct Column {
#if BOXED
    const unsigned char* weights;  // of the box
    Box box;
    int fragment;  // of tile 0
#else
    const unsigned char*
        weights;     // of row lane / 4 of tile 0, this lane's 16 bytes of this warp's first chunk
    u32 high, tile;  // bytes to row lane / 4 + 8, and to the next tile
#endif
    int groups;       // of 32 channels; 0: no expert
    int first, step;  // this warp's first chunk, and from one to the next
    uint4 words[UNROLL][ROW_TILES][2];

    // Request chunk i of this warp.
#if BOXED
    __device__ __forceinline__ Chunk chunk(int of_fragment, int c) const {
        return Chunk(of_fragment, box.rows, min(STAGE_GROUPS, groups - c / 2 * STAGE_GROUPS), c % 2);
    }
    __device__ __forceinline__ void load(int i, uint4 (&to)[ROW_TILES][2]) const {
        const int c = first + step * i;
        const auto* from = reinterpret_cast<const uint4*>(weights) + c / 2 * box.all() * STAGE_GROUPS;
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
            to[m][0] = to[m][1] = make_uint4(0, 0, 0, 0);
            if (4 * c >= groups) continue;
            const Chunk at = chunk(fragment + m, c);
            if (!at.here) continue;
            to[m][0] = load_once<true>(from + at.first);
            to[m][1] = load_once<true>(from + at.second);
        }
    }
#else
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
#endif
    __device__ __forceinline__ void start() {
#pragma unroll
        for (int j = 0; j < UNROLL; ++j) load(j, words[j]);
    }

    // What a chunk takes from shared memory.
    struct Operands {
        uint4 b[4];
        u32 scales[ROW_TILES][2];
    };
    // x: of this lane's group and column, of chunk 0; chunk_units: to the next chunk. Other lanes: zeros, and
    // 0.
    __device__ __forceinline__ Operands operands(int c, const unsigned char* scales, int high_scales,
                                                 int tile_scales, const uint4* x, int chunk_units) const {
        const int t = threadIdx.x % 4, group = min(4 * c + t, groups - 1);
        const uint4* from = x + group / 4 * chunk_units;
        Operands out;
#pragma unroll
        for (int i = 0; i < 4; ++i) out.b[i] = from[i];
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
#if BOXED
            // behind the last chunk: anything
            const int last = min(c, (groups - 1) / 4);
            const Chunk at = chunk(0, last);
            const unsigned char* of = scales + m * box.rows * groups + last / 2 * box.rows * STAGE_GROUPS;
            out.scales[m][0] = of[at.first];
            out.scales[m][1] = of[at.second];
#else
#pragma unroll
            for (int h = 0; h < 2; ++h) out.scales[m][h] = scales[m * tile_scales + h * high_scales + group];
#endif
        }
        return out;
    }

    // sums += the chunk's products of rows lane / 4 and lane / 4 + 8, of this lane's group.
    template <bool LARGE>
    __device__ __forceinline__ static void multiply_chunk(float (&sums)[ROW_TILES][2],
                                                          const uint4 (&rows)[ROW_TILES][2],
                                                          const Operands& with) {
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
            float parts[2][4] = {};
            const Factor low = Factor::of<LARGE>(with.scales[m][0]),
                         high = Factor::of<LARGE>(with.scales[m][1]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 l[4], h[4];
#if BOXED
                const int even = i / 2 * 2;
                spread_arranged(word_of(rows[m][0], even), word_of(rows[m][0], even + 1), i, l);
                spread_arranged(word_of(rows[m][1], even), word_of(rows[m][1], even + 1), i, h);
                if (LARGE) {
                    scale_pairs<LARGE>(l, low);
                    scale_pairs<LARGE>(h, high);
                }
#else
                if (LARGE) {
                    decode<LARGE>(l, word_of(rows[m][0], i), low);
                    decode<LARGE>(h, word_of(rows[m][1], i), high);
                } else {
                    place(l, word_of(rows[m][0], i));
                    place(h, word_of(rows[m][1], i));
                }
#endif
                const u32 first[4] = {l[0], h[0], l[1], h[1]}, second[4] = {l[2], h[2], l[3], h[3]};
                multiply_add(parts[0], first, with.b[i].x, with.b[i].y);
                multiply_add(parts[1], second, with.b[i].z, with.b[i].w);
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float scale =
                    LARGE ? 1.0f : __uint_as_float(with.scales[m][h] * 0x00800000u + 0x0f000000u);
                sums[m][h] = fmaf(parts[0][2 * h] + parts[1][2 * h], scale, sums[m][h]);
            }
        }
    }

    // scales: of this lane's row of tile 0; high_scales, tile_scales: bytes to other rows. zeros: 64 bytes.
    // sums of rows lane / 4 and lane / 4 + 8. LARGE: x is not scaled, and a scale of the block may be large.
    template <bool LARGE>
    __device__ __forceinline__ void multiply(float (&sums)[ROW_TILES][2], const unsigned char* scales,
                                             int high_scales, int tile_scales, const uint4* x,
                                             const uint4* zeros) {
        const int lane = threadIdx.x % 32, t = lane % 4;
        const bool own = lane / 4 == 2 * t;
        const uint4* of_lane = own ? x + 4 * t : zeros;
        const int chunk_units = own ? 16 : 0;
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) sums[m][0] = sums[m][1] = 0.0f;
        if (4 * first < groups) {
            Operands next = operands(first, scales, high_scales, tile_scales, of_lane, chunk_units);
            for (int i = 0; 4 * (first + step * i) < groups; i += UNROLL)
#pragma unroll
                for (int j = 0; j < UNROLL; ++j) {
                    const int c = first + step * (i + j);
                    if (4 * c >= groups) break;
                    const Operands now = next;
                    next = operands(c + step, scales, high_scales, tile_scales, of_lane, chunk_units);
                    multiply_chunk<LARGE>(sums, words[j], now);
                    load(i + j + UNROLL, words[j]);
                }
        }
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int other = 1; other < 4; other *= 2)
                    sums[m][h] += __shfl_xor_sync(~0u, sums[m][h], other);
    }
};
