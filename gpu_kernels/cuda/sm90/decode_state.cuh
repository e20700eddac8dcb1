// SPDX-License-Identifier: Apache-2.0
// What a warp of decode_attention knows of its queries, and how a cluster, then its sections, merge that.
#pragma once

#include "sm90/decode_block.cuh"

// What a lane knows of queries 8 n + 2 * (lane % 4) and the next.
struct State {
    float highest[GROUPS][2], total[GROUPS][2];  // of scores; of this lane's exponentials
    float sums[D / 16][GROUPS][4];               // channels 16 m + lane / 4 and 8 more, of both queries each

    // 16 keys; the row has `left` from the first of them on. q: chunks 4 i + lane % 4 of query 8 n + lane
    // / 4.
    __device__ __forceinline__ void attend(u32 slot, const uint4 (&q)[GROUPS][FOURS], int left, float scale) {
        const int lane = threadIdx.x % 32;
        float even[GROUPS][4] = {}, odd[GROUPS][4] = {};
#pragma unroll
        for (int i = 0; i < FOURS; ++i) {
            const uint4 low = load_16(slot + (i * 32 + lane) * 16);
            const uint4 high = load_16(slot + ((FOURS + i) * 32 + lane) * 16);
            const u32 a[4] = {low.x, high.x, low.y, high.y}, b[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int n = 0; n < GROUPS; ++n) {
                multiply_add(even[n], a, q[n][i].x, q[n][i].y);
                multiply_add(odd[n], b, q[n][i].z, q[n][i].w);
            }
        }
        u32 weights[GROUPS][2];  // of keys 0 .. 7 and 8 .. 15: queries by keys
        float shrink[GROUPS][2];
#pragma unroll
        for (int n = 0; n < GROUPS; ++n) {
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                p[i] = lane / 4 + i / 2 * 8 < left ? (even[n][i] + odd[n][i]) * scale
                                                   : __int_as_float(0xff800000);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float most = fmaxf(p[i], p[i + 2]);
#pragma unroll
                for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
                most = fmaxf(most, highest[n][i]);
                shrink[n][i] = exp2_of(highest[n][i] - most);
                highest[n][i] = most;
                p[i] = exp2_of(p[i] - most);
                p[i + 2] = exp2_of(p[i + 2] - most);
                total[n][i] = total[n][i] * shrink[n][i] + (p[i] + p[i + 2]);
            }
            weights[n][0] = transposed(pack(p[0], p[1]));
            weights[n][1] = transposed(pack(p[2], p[3]));
        }
        const u32 row = lane / 16 * 8 + lane % 8, next = lane / 8 % 2;
#pragma unroll
        for (int m = 0; m < D / 16; ++m) {
            u32 channels[4];
            load_transposed(channels, slot + value_at(row, 2 * m + next));
#pragma unroll
            for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[m][n][i] *= shrink[n][i % 2];
                multiply_add(sums[m][n], channels, weights[n][0], weights[n][1]);
            }
        }
    }
};

// Two floats to a block of the cluster, whose barrier counts them.
__device__ __forceinline__ void send(u32 memory, u32 at, u32 rank, float first, float second) {
    if (PARTS == 1)
        store_two(memory + at, first, second);
    else
        send_two(memory + at, rank, memory + BARRIER, first, second);
}

// The state of warp `me` of the cluster, to the blocks that merge it.
__device__ __forceinline__ void send_state(u32 memory, const State& state, int me) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
        const u32 query = 8 * n + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < D / 8; ++m) {
            const u32 column = m * 8 % COLUMNS + lane / 4;
            send(memory, SUMS + ((me * COLUMNS + column) * QUERIES + query) * 4, m * 8 / COLUMNS,
                 state.sums[m / 2][n][m % 2 * 2], state.sums[m / 2][n][m % 2 * 2 + 1]);
        }
        float total[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            total[i] = state.total[n][i];
#pragma unroll
            for (int step = 4; step < 32; step *= 2) total[i] += __shfl_xor_sync(~0u, total[i], step);
        }
        if (lane / 4 < PARTS) {
            const u32 at = STATES + (2 * me * QUERIES + query) * 4;
            send(memory, at, lane / 4, state.highest[n][0], state.highest[n][1]);
            send(memory, at + QUERIES * 4, lane / 4, total[0], total[1]);
        }
    }
}

// Scores' maximum, sum of exponentials and sums of values, of one query and pairs of this block's channels.
struct Result {
    float highest, total, sums[EACH][2];

    __device__ __forceinline__ static int query() { return threadIdx.x % QUERIES; }
    __device__ __forceinline__ static int column(int e) {
        return 2 * (threadIdx.x / QUERIES + e * (THREADS / QUERIES));
    }
    // Merge `count` parts in their order. states: [2][QUERIES], maximum and sum, each; values: [COLUMNS]
    // [QUERIES] each. The next part is `state_pitch` and `pitch` floats away.
    __device__ __forceinline__ void merge(const float* states, const float* values, int count,
                                          int state_pitch, int pitch) {
        highest = LOWEST;
#pragma unroll
        for (int w = 0; w < count; ++w) highest = fmaxf(highest, states[w * state_pitch + query()]);
        total = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; ++e) sums[e][0] = sums[e][1] = 0.0f;
#pragma unroll
        for (int w = 0; w < count; ++w) {
            const float weight = exp2_of(states[w * state_pitch + query()] - highest);
            total = fmaf(states[w * state_pitch + QUERIES + query()], weight, total);
#pragma unroll
            for (int e = 0; e < EACH; ++e)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    sums[e][i] =
                        fmaf(values[w * pitch + (column(e) + i) * QUERIES + query()], weight, sums[e][i]);
        }
    }
    // To [2 + COLUMNS][QUERIES].
    __device__ __forceinline__ void store(float* to) const {
        to[query()] = highest;  // the same from all threads of a query
        to[QUERIES + query()] = total;
#pragma unroll
        for (int e = 0; e < EACH; ++e)
#pragma unroll
            for (int i = 0; i < 2; ++i) to[(2 + column(e) + i) * QUERIES + query()] = sums[e][i];
    }
    __device__ __forceinline__ void write(u16* out, int rank) const {
        if (query() >= GROUP) return;
        const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            *reinterpret_cast<u32*>(out + query() * D + rank * COLUMNS + column(e)) =
                pack(sums[e][0] * inverse, sums[e][1] * inverse);
    }
};
