// SPDX-License-Identifier: Apache-2.0
// What two products of sorted rows do with a warpgroup's sums: staged in shared memory, then written to rows
// of act or out. Sums: [PARTS][MAX_N / 2], of PARTS x 64 weight rows and the rows of a tile.
#pragma once

#include "common/flags.cuh"
#include "sm90/items.cuh"
#include "sm90/wgmma.cuh"

// A piece of a warpgroup's output: [ROWS][CHANNELS].
template <int PARTS, bool DOWN>
struct Piece {
    static constexpr int CHANNELS = PARTS * (DOWN ? 64 : 32), CHUNKS = CHANNELS / 8, ROWS = DOWN ? 16 : 32,
                         BYTES = ROWS * CHANNELS * 2;

    // Swizzled offset of 16 bytes: eight rows of one chunk touch every bank once.
    static __device__ __forceinline__ u32 at(int row, int chunk) {
        return row * CHANNELS * 2 + (chunk ^ (CHUNKS == 4 ? row / 2 % 4 : row % 8)) * 16;
    }
};

// Matrices of 8 channels x 8 rows of the tile, one word of each a thread. finish: low(part, sum) and
// high(part, sum) of down, both(part, gate, up) of gate_up.
template <bool DOWN, int PARTS, int SUMS, typename Finish>
__device__ __forceinline__ void to_piece(u32 piece, const float (&sums)[PARTS][SUMS], const Finish& finish,
                                         int first_column) {
    using Part = Piece<PARTS, DOWN>;
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        if constexpr (DOWN) {
            const float* d = sums[part] + first_column / 8 * 4;
            const auto low = [&](int i) { return finish.low(part, d[i]); };
            const auto high = [&](int i) { return finish.high(part, d[i]); };
            // low and high eight channels of the warp's 16, for two groups of eight rows
            const int row = lane % 8 + lane / 16 * 8, chunk = part * 8 + warp * 2 + lane / 8 % 2;
            store_transposed(piece + Part::at(row, chunk), pack(low(0), low(1)), pack(high(2), high(3)),
                             pack(low(4), low(5)), pack(high(6), high(7)));
        } else {
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                words[j] = 0;
                if (first_column + 8 * j >= 2 * SUMS) continue;  // the last piece may hold less
                const float* d = sums[part] + (first_column / 8 + j) * 4;
                words[j] = pack(finish.both(part, d[0], d[2]), finish.both(part, d[1], d[3]));
            }
            store_transposed(piece + Part::at(lane, part * 4 + warp), words[0], words[1], words[2], words[3]);
        }
    }
}

// pieces: two buffers of each of WARPGROUPS consumers. done: of the tile, of gate_up.
template <bool DOWN, int WARPGROUPS, int PARTS, int SUMS, typename Finish>
__device__ __forceinline__ void write(u32 pieces, const float (&sums)[PARTS][SUMS], const Finish& finish,
                                      u16* out, const Item& item, int width, int* done) {
    using Part = Piece<PARTS, DOWN>;
    const int thread = threadIdx.x % 128, group = threadIdx.x / 128 - 1;
    const int channel = (item.block * WARPGROUPS + group) * Part::CHANNELS;
    int buffer = 0;
#pragma unroll
    for (int first = 0; first < 2 * SUMS; first += Part::ROWS) {
        if (first < item.rows) {
            const u32 piece = pieces + (group * 2 + buffer) * Part::BYTES;
            to_piece<DOWN>(piece, sums, finish, first);
            named_sync(1 + group, 128);
#pragma unroll
            for (int i = thread; i < Part::ROWS * Part::CHUNKS; i += 128) {
                const int row = i / Part::CHUNKS, chunk = i % Part::CHUNKS;
                if (first + row < item.rows && channel + chunk * 8 < width) {
                    u16* to = out + static_cast<u64>(item.first + first + row) * width + channel + chunk * 8;
                    *reinterpret_cast<uint4*>(to) = load_16(piece + Part::at(row, chunk));
                }
            }
            buffer ^= 1;
        }
    }
    // the barrier of one buffer orders reuse of the other; after the last, all of act is written
    named_sync(1 + group, 128);
    if (!DOWN && thread == 0) add_release(done, 1);
}
