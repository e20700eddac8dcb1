// SPDX-License-Identifier: Apache-2.0
// What a warp of mxfp4_mlp does with its sums: to rows of act or out, without shared memory.
#pragma once

#include "common/flags.cuh"
#include "sm80/mma.cuh"
#include "sm90/mxfp4_place.cuh"

// A matrix of 8 channels x 8 rows of the tile, two rows a lane, to rows of act or out; rows: valid ones.
__device__ __forceinline__ void write_matrix(u16* to, u32 two, int width, int rows, bool here) {
    const int lane = threadIdx.x % 32;
    const u32 word = transposed(two);
    if (here && lane / 4 < rows)
        *reinterpret_cast<u32*>(to + static_cast<u64>(lane / 4) * width + lane % 4 * 2) = word;
}

// A warp's sums to rows of act or out. done: of the tile, of gate_up.
template <typename Bias>
__device__ __forceinline__ void write_rows(const Sums& sums, const Bias& bias, u16* out, const Item& item,
                                           int width, int* done) {
    const int group = threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / 32;
    const int at = (item.block * GROUPS + group) * PARTS;  // of 64 weight rows
    u16* row = out + static_cast<u64>(item.first) * width;
#pragma unroll
    for (int first = 0; first < MAX_N; first += 8) {
        if (first >= item.rows) break;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const float* d = sums[part] + first / 2;
            if (item.kind == DOWN) {
                const int channel = (at + part) * 64 + warp * 16;
                write_matrix(row + channel, pack(bias.low(part, d[0]), bias.low(part, d[1])), width,
                             item.rows - first, channel < width);
                write_matrix(row + channel + 8, pack(bias.high(part, d[2]), bias.high(part, d[3])), width,
                             item.rows - first, channel + 8 < width);
            } else {
                const int channel = (at + part) * 32 + warp * 8;
                write_matrix(row + channel, pack(bias.both(part, d[0], d[2]), bias.both(part, d[1], d[3])),
                             width, item.rows - first, channel < width);
            }
        }
        row += 8 * static_cast<u64>(width);
    }
    if (item.kind == DOWN) return;
    __syncwarp();
    if (threadIdx.x % 32 == 0) add_release(done, 1);
}
