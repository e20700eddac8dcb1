// SPDX-License-Identifier: Apache-2.0
// The bins of draw_tokens: counting over a cluster, and the search for a place among them.
#pragma once

#include "common/draw_row.cuh"

constexpr int WARPS = THREADS / 32, OWN = BINS / THREADS, PART = BINS / CLUSTER;
constexpr int LIST = 256;  // tokens that are taken one by one

struct Shared {
    u32 counts[BINS], deficits[BINS];  // of this block; after `add_blocks`, of the cluster
    u32 part_counts[PART], part_deficits[PART];
    u64 masses[BINS];  // of the first pass; with `tokens`
    u32 tokens[BINS];
    u64 found[2][LIST];  // of this block's tokens, by turns: a peer may still read the last ones
    u64 list[LIST];      // of the cluster's
    u32 amounts[LIST];   // theirs
    u64 lowest, highest;
    u64 sums[2][WARPS];
    u64 before_count, before_amount;  // what `search` found, with bin and inside
    u64 at, mass;                     // what `find` found
    int bin, inside;
    int found_count[2];
};

__device__ __forceinline__ u32 read_word(const u32* here, int rank) {
    return read_from(reinterpret_cast<const int*>(here), rank);
}

__device__ __forceinline__ u64 read_long(const u64* here, int rank) {
    const u32* words = reinterpret_cast<const u32*>(here);
    return static_cast<u64>(read_word(words + 1, rank)) << 32 | read_word(words, rank);
}

__device__ __forceinline__ void clear(Shared& shared) {
    for (int i = threadIdx.x; i < BINS; i += THREADS) shared.counts[i] = shared.deficits[i] = 0;
    __syncthreads();
}

__device__ __forceinline__ void add(Shared& shared, int bin, float place) {
    atomicAdd(shared.counts + bin, 1u);
    if (const u32 deficit = deficit_of(place)) atomicAdd(shared.deficits + bin, deficit);
}

// The sums over the cluster of what its blocks added: each block makes a part, then all read the parts.
__device__ __forceinline__ void add_blocks(Shared& shared) {
    if (CLUSTER == 1) return __syncthreads();
    sync_cluster();
    for (int i = threadIdx.x; i < PART; i += THREADS) {
        const int bin = rank_in_cluster() * PART + i;
        u32 count = 0, deficit = 0;
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) {
            count += read_word(shared.counts + bin, rank);
            deficit += read_word(shared.deficits + bin, rank);
        }
        shared.part_counts[i] = count, shared.part_deficits[i] = deficit;
    }
    sync_cluster();
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int bin = i * THREADS + threadIdx.x;
        shared.counts[bin] = read_word(shared.part_counts + bin % PART, bin / PART);
        shared.deficits[bin] = read_word(shared.part_deficits + bin % PART, bin / PART);
    }
    __syncthreads();
}

__device__ __forceinline__ u64 amount_in(const Shared& shared, int bin) {
    return static_cast<u64>(shared.counts[bin]) * static_cast<u64>(UNIT) - shared.deficits[bin];
}

// What the threads before this one have of both.
__device__ __forceinline__ void sums_before(Shared& shared, u64& count, u64& amount) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u64 own_count = count, own_amount = amount;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u64 more_count = __shfl_up_sync(~0u, count, step);
        const u64 more_amount = __shfl_up_sync(~0u, amount, step);
        if (lane >= step) count += more_count, amount += more_amount;
    }
    __syncthreads();
    if (lane == 31) shared.sums[0][warp] = count, shared.sums[1][warp] = amount;
    __syncthreads();
    count -= own_count, amount -= own_amount;
    for (int i = 0; i < warp; ++i) count += shared.sums[0][i], amount += shared.sums[1][i];
}

// The first bin after which `passed` (of the count and the amount up to there) holds. There is one. counts,
// amounts: of bins OWN * threadIdx.x and on.
template <class Passed>
__device__ __forceinline__ void search(Shared& shared, const u32 (&counts)[OWN], const u64 (&amounts)[OWN],
                                       Passed passed) {
    u64 count = 0, amount = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) count += counts[i], amount += amounts[i];
    sums_before(shared, count, amount);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const u64 next_count = count + counts[i], next_amount = amount + amounts[i];
        if (!passed(count, amount) && passed(next_count, next_amount)) {
            shared.bin = threadIdx.x * OWN + i, shared.inside = counts[i];
            shared.before_count = count, shared.before_amount = amount;
        }
        count = next_count, amount = next_amount;
    }
    __syncthreads();
}
