// SPDX-License-Identifier: Apache-2.0
// What the producer warpgroup of mxfp4_mlp does: one warp loads weights and scales, three load rows.
#pragma once

#include "sm90/mxfp4_block.cuh"
#if BOXED
#include "sm90/sparse.cuh"
#endif

#if READ_ONCE
#define POLICY , policy
#else
#define POLICY
#endif

#if !BOXED
using Weights = const TensorMap*;
__device__ __forceinline__ Weights weights_of(const TensorMap& map) { return &map; }

// Scales of an item's rows, as they lie: of gate_up RANGE gate rows of each of four times 32, and the up rows
// of the same channels, between them where the order is INTERLEAVED.
__device__ __forceinline__ void load_scales(u32 to, u32 full, const unsigned char* gate_up,
                                            const unsigned char* down, const Work& work, const Item& item) {
    const int pitch = work.depth(item) / 32;
    if (item.kind == DOWN) {
        const int row = item.block * WEIGHT_ROWS, rows = min(WEIGHT_ROWS, work.H - row);
        barrier_arrive_expect(full, rows * pitch);
        bytes_load(to, down + (static_cast<u64>(item.expert) * work.H + row) * pitch, rows * pitch, full);
        return;
    }
    const int first = item.block / (2 / BOXES) * UNIT, ranges = min(4, (work.I - first) / 32);
    const int within = BOXES == 1 ? item.block % 2 * 16 : 0;
    barrier_arrive_expect(full, ranges * 2 * RANGE * pitch);
    const unsigned char* expert = gate_up + static_cast<u64>(item.expert) * 2 * work.I * pitch;
    for (int i = 0; i < ranges; ++i) {
        const int row = first + 32 * i + within;
#if INTERLEAVED
        bytes_load(to + i * 2 * RANGE * pitch, expert + 2 * row * pitch, 2 * RANGE * pitch, full);
#else
        bytes_load(to + i * RANGE * pitch, expert + row * pitch, RANGE * pitch, full);
        bytes_load(to + (4 + i) * RANGE * pitch, expert + (work.I + row) * pitch, RANGE * pitch, full);
#endif
    }
}
#else
// The boxes of an item, in which stages follow one another.
struct Boxes {
    const unsigned char *blocks[BOXES], *scales[BOXES];
    int rows[BOXES], all, groups;

    __device__ __forceinline__ Boxes(const unsigned char* gate_up, const unsigned char* down,
                                     const unsigned char* gate_up_scales, const unsigned char* down_scales,
                                     const Work& work, const Item& item)
        : all(0), groups(work.depth(item) / 32) {
        const bool is_down = item.kind == DOWN;
        const u64 expert = static_cast<u64>(item.expert) * (is_down ? work.H : 2 * work.I);
#pragma unroll
        for (int i = 0; i < BOXES; ++i) {
            const int at = item.block * BOXES + i;
            const Box box = is_down ? Box::of_down(at, work.H) : Box::of_gate_up(at, work.I);
            const u64 chunks = (expert + box.before) * groups;
            blocks[i] = (is_down ? down : gate_up) + 16 * chunks;
            scales[i] = (is_down ? down_scales : gate_up_scales) + chunks;
            rows[i] = box.all();
            all += rows[i];
        }
    }
    // The stage from a group on.
    __device__ __forceinline__ void load(u32 to, u32 full, int group, u64 policy) {
        const int wide = min(STAGE_GROUPS, groups - group);
        barrier_arrive_expect(full, all * wide * 17);
#pragma unroll
        for (int i = 0; i < BOXES; ++i) {
            const u32 chunks = rows[i] * wide;
            if (chunks == 0) break;
            bytes_load(to + i * BOX_BYTES, blocks[i], 16 * chunks, full POLICY);
            bytes_load(to + BOXES * BOX_BYTES + i * BOX_SCALES, scales[i], chunks, full POLICY);
            blocks[i] += 16 * chunks;
            scales[i] += chunks;
        }
    }
};
using Weights = const unsigned char*;
__device__ __forceinline__ Weights weights_of(const unsigned char* blocks) { return blocks; }
#endif

__device__ __forceinline__ void load_weights(const Shared& shared, Weights gate_up, Weights down,
                                             const unsigned char* gate_up_scales,
                                             const unsigned char* down_scales, const Work& work, int* taken) {
    Turn<WEIGHT_STAGES> turn;
    Turn<SLOTS> slot;
#if BOXED || READ_ONCE
    const u64 policy = evict_first();
#endif
#if !BOXED
    Turn<2> scales;
#endif
    // also the first: only resident blocks claim items, so a part of a GPU suffices
    Item item = work.item(atomicAdd(taken, 1)), next{};
    for (; item.kind != NONE; item = next) {
        shared.items.tell(slot, item);
        const int i = atomicAdd(taken, 1), depth = work.depth(item);
#if BOXED
        Boxes boxes(gate_up, down, gate_up_scales, down_scales, work, item);
#else
        barrier_wait(shared.scales_empty + 8 * scales.at, scales.parity ^ 1);
        load_scales(shared.scales + scales.at * SCALE_BYTES, shared.scales_full + 8 * scales.at,
                    gate_up_scales, down_scales, work, item);
        scales.next();
#endif
        for (int k = 0; k < depth; k += 2 * UNIT) {
            if (k == depth / 2 / (2 * UNIT) * (2 * UNIT)) next = work.item(i);  // early: hides the latency
            const u32 full = shared.weights_full + 8 * turn.at;
            barrier_wait(shared.weights_empty + 8 * turn.at, turn.parity ^ 1);
#if BOXED
            boxes.load(shared.weights + turn.at * WEIGHT_BYTES, full, k / 32, policy);
#else
            barrier_arrive_expect(full, WEIGHT_BYTES);
#pragma unroll
            for (int box = 0; box < BOXES; ++box) {
                const u32 to = shared.weights + turn.at * WEIGHT_BYTES + box * BOX_BYTES;
                const int at = item.block * BOXES + box;  // of 128 rows
                if (item.kind == DOWN)
                    tensor_load_5d(to, down, full, k / 2, 0, 0, at * 16, item.expert POLICY);
                else
                    tensor_load_5d(to, gate_up, full, k / 2, at % 2 * 16, at / 2 * 4, 0, item.expert POLICY);
            }
#endif
            turn.next();
        }
    }
    shared.items.tell(slot, item);
}

constexpr int GATHER_ROWS = 4;  // of a warp's copy: eight lanes a row of 128 bytes

__device__ __forceinline__ void load_rows(const Shared& shared, const u16* hidden, const u16* act,
                                          const int* row_tokens, const Work& work) {
    constexpr int COPIES = (MAX_N / GATHER_ROWS + GATHER_WARPS - 1) / GATHER_WARPS;
    constexpr int STRIDE = GATHER_WARPS * GATHER_ROWS;
    const int warp = threadIdx.x / 32 - 1, lane = threadIdx.x % 32, chunk = lane % 8;
    // copy j is of rows (warp + 3 j) * 4 + lane / 8: the swizzle knows odd and even j
    const int row_of_lane = warp * GATHER_ROWS + lane / 8;
    const u32 even = (chunk ^ (row_of_lane % 8)) * 16, odd = (chunk ^ ((row_of_lane + 4) % 8)) * 16;
    Turn<ROW_STAGES> turn;
    Turn<SLOTS> slot;
    for (Item item = shared.items.hear(slot); item.kind != NONE; item = shared.items.hear(slot)) {
        const int units = units_of(work.depth(item));
        // copies of this warp; padding rows of the last copy repeat a valid row, and their sums are not
        // stored
        const int copies = (item.rows - warp * GATHER_ROWS + STRIDE - 1) / STRIDE;
        u32 sources[COPIES];  // in units of 16 bytes; in shared memory they cost 6 % of the time
#pragma unroll
        for (int j = 0; j < COPIES; ++j) {
            const int row = item.first + min(row_of_lane + j * STRIDE, item.rows - 1);
            sources[j] = 0;
            // max is a guard: the sort writes no token below 0
            if (j < copies) sources[j] = item.kind == DOWN ? row : max(row_tokens[row], 0);
            sources[j] *= static_cast<u32>(units * (UNIT / 8));
        }
        if (item.kind == DOWN) wait_for_tile(work.tiles + item.tile, WRITERS * work.gate_up_blocks);
        const uint4* from = reinterpret_cast<const uint4*>(item.kind == DOWN ? act : hidden) + chunk;
        for (int unit = 0; unit < units; unit += ROW_UNITS) {
            barrier_wait(shared.rows_empty + 8 * turn.at, turn.parity ^ 1);
            u32 to = shared.rows + turn.at * ROW_BYTES + row_of_lane * 128;
#pragma unroll
            for (int half = 0; half < 2 * ROW_UNITS; ++half, from += 8, to += HALF_BYTES) {
                if (half == 2 && unit + 1 == units) break;
#pragma unroll
                for (int j = 0; j < COPIES; ++j)
                    if (j < copies) copy_16(to + j * STRIDE * 128 + (j % 2 ? odd : even), from + sources[j]);
            }
            copies_arrive(shared.rows_full + 8 * turn.at);
            turn.next();
        }
    }
}
