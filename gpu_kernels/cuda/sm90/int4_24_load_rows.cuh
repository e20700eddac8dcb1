// SPDX-License-Identifier: Apache-2.0
// What fills the ring of int4_24_load.cuh with rows in fp16, and their powers: the gathering warps of
// int4_24_mlp.cu.
#pragma once

#include "sm90/int4_24_fp16.cuh"
#include "sm90/int4_24_load.cuh"

constexpr int POWERS = STAGES + 1;  // items whose rows are in shared memory, or in use

// Powers of the rows of an item, and a word, behind the rest.
__device__ __forceinline__ u32 powers_of(const Shared& shared, int item) {
    return shared.end() + item * MAX_N * 4;
}
__device__ __forceinline__ u32 word_of(const Shared& shared) { return powers_of(shared, POWERS); }

constexpr int ROWS_AT_ONCE = 4;  // of a warp's copy: eight lanes a row of 128 bytes
constexpr int COPIES = (MAX_N / ROWS_AT_ONCE + GATHER_WARPS - 1) / GATHER_WARPS;
constexpr int UNROLLED = COPIES > 8 ? 1 : SLABS;  // these warps have few registers

// Rows in fp16, in the order of int4_24_rows, and what their sums are multiplied by.
struct Rows {
    const u16* rows;
    const float* powers;
};

// Where a chunk of 16 bytes lies in a row of 128, as products read it.
__device__ __forceinline__ int place_of(int row, int chunk) { return chunk ^ row % 8; }

// Copy j of a warp is of rows (warp + GATHER_WARPS j) * 4 + lane / 8. parts: of a tile's activations.
__device__ __forceinline__ void load_rows(const Shared& shared, const Rows& hidden, const Rows& act,
                                          const int* row_tokens, const Work& work, int parts) {
    constexpr int STRIDE = GATHER_WARPS * ROWS_AT_ONCE;
    static_assert(STRIDE % 8 == 4, "the swizzle knows odd and even copies");
    const int warp = threadIdx.x / 32 - 1, lane = threadIdx.x % 32, chunk = lane % 8;
    const int row_of_lane = warp * ROWS_AT_ONCE + lane / 8;
    const u32 even = place_of(row_of_lane, chunk) * 16, odd = place_of(row_of_lane + 4, chunk) * 16;
    Turn<STAGES> turn;
    Turn<POWERS> item_turn;
    Turn<SLOTS> slot;
    for (Item item = shared.items().hear(slot); item.kind != NONE; item = shared.items().hear(slot)) {
        const u16* rows = item.kind == DOWN ? act.rows : hidden.rows;
        const float* powers = item.kind == DOWN ? act.powers : hidden.powers;
        const int slabs = padded(work.depth(item)) / 64;
        // copies of this warp; padding rows of the last copy repeat a valid row, and their sums are not
        // stored
        const int copies = (item.rows - warp * ROWS_AT_ONCE + STRIDE - 1) / STRIDE;
        const auto source = [&](int row) {  // max is a guard: no token is below 0
            row = item.first + min(row, item.rows - 1);
            return item.kind == DOWN ? row : max(row_tokens[row], 0);
        };
        u32 sources[COPIES];  // in units of 16 bytes
#pragma unroll
        for (int j = 0; j < COPIES; ++j) {
            sources[j] = 0;
            if (j < copies) sources[j] = source(row_of_lane + j * STRIDE);
            sources[j] *= static_cast<u32>(slabs * 8);
        }
        if (item.kind == DOWN) wait_for_tile(work.tiles + item.tile, parts);
        const uint4* from = reinterpret_cast<const uint4*>(rows) + chunk;
        for (int at = 0; at < slabs; at += SLABS) {
            barrier_wait(shared.empty(turn.at), turn.parity ^ 1);
            if (at == 0)
                for (int row = threadIdx.x - 32; row < item.rows; row += 32 * GATHER_WARPS)
                    copy_4(powers_of(shared, item_turn.at) + row * 4, powers + source(row));
            u32 to = shared.rows + turn.at * STAGE_ROWS + row_of_lane * 128;
#pragma unroll UNROLLED
            for (int s = 0; s < SLABS; ++s, from += 8, to += ROW_SLAB) {
                if (s > 0 && at + s >= slabs) break;
#pragma unroll
                for (int j = 0; j < COPIES; ++j)
                    if (j < copies) copy_16(to + j * STRIDE * 128 + (j % 2 ? odd : even), from + sources[j]);
            }
            copies_arrive(shared.full(turn.at));
            turn.next();
        }
        item_turn.next();
    }
}
