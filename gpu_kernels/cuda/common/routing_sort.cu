// SPDX-License-Identifier: Apache-2.0
// Sort the token-expert pairs of one routing by expert: stable, deterministic, in one launch.
//
// | argument   | shape   | dtype          |                                                                |
// |------------|---------|----------------|----------------------------------------------------------------|
// | ids        | [T, K]  | int32; ID64: int64 | any value; outside 0 .. E_ids-1 names no expert            |
// | expert_map | [E_ids] | int32 or null  | local index of each expert, -1 = not here; null: the same      |
// | num_tokens | []      | int32 or null  | tokens past it route nowhere                                   |
// | row_tokens | [P]     | int32, out     | token of each sorted row; rows that no pair has: not written   |
// | inverse    | [P]     | int32, out     | sorted row of each pair, -1 where it has none                  |
// | tiles      | [bound] | Tile, out      | in the order of experts; at most tile_rows rows each           |
// | num_tiles  | [2]     | int32, out     | tiles in use; 0, with which blocks count what they took        |
// | counts     | [blocks, E] | int32      | of routing_count; PARTED 0: null                               |
//
// P = T*K. Launch: one cluster of CLUSTER blocks of THREADS threads, or with PARTED any number of blocks; E
// <= THREADS. Dynamic shared memory: 256 + (WARPS + 2) * E * 4 bytes. Each warp ranks a contiguous run of
// pairs and counts them per expert in shared memory. The counts are then summed over the warps, and over the
// blocks. An expert's tiles have as many rows as one another, or GRANULE more; its last may have fewer.
// Consumers: the grouped product, combine.
#include "common/cluster.cuh"
#include "common/routing.cuh"
#include "common/scan.cuh"

#ifndef THREADS
#define THREADS 1024
#endif
#ifndef PARTED
#define PARTED 0
#endif
#ifndef WAIT_LATE
// 1: the predecessor is a kernel of this call, which waited first and writes nothing that is read here
#define WAIT_LATE 0
#endif
#ifndef GRANULE
#define GRANULE 8
#endif
static_assert(CLUSTER == 1 || !PARTED, "a cluster, or parts");

constexpr int WARPS = THREADS / 32;
constexpr int AHEAD = 4;  // loads in flight per lane

// Rank of each lane's pair among the warp's pairs of the same expert; counts[e] grows by them. All lanes take
// part. It votes on each bit of the expert's index, which is faster than match.any.
__device__ __forceinline__ int rank_in_warp(int e, int* counts, int bits) {
    u32 same = __ballot_sync(~0u, e >= 0);
    for (int bit = 0; bit < bits; ++bit) {
        const u32 set = __ballot_sync(~0u, e >> bit & 1);
        same &= e >> bit & 1 ? set : ~set;
    }
    const int before = __popc(same & ((1u << (threadIdx.x % 32)) - 1));
    const int seen = e >= 0 ? counts[e] : 0;
    __syncwarp();
    if (e >= 0 && before == 0) counts[e] = seen + __popc(same);
    __syncwarp();
    return seen + before;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    routing_sort(const Id* ids, const int* expert_map, const int* num_tokens, int* row_tokens, int* inverse,
                 Tile* tiles, int* num_tiles, const int* counts_of_parts, int P, int E_ids, int E, int K,
                 int tile_rows) {
    u64* sums = reinterpret_cast<u64*>(dynamic_memory());  // [32] of warps
    int* counts = reinterpret_cast<int*>(sums + 32);       // [WARPS][E]
    int* here = counts + WARPS * E;                        // [E] pairs of this block, of several
    int* base = here + E;                                  // [E] first row of this block's pairs

    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int blocks = PARTED ? gridDim.x : CLUSTER, rank = PARTED ? blockIdx.x : rank_in_cluster();
    const int bits = 32 - __clz(E - 1), run = part_of(P, THREADS * blocks);
    const int begin = (rank * WARPS + warp) * run, end = min(begin + run, P);
    const bool held = run <= 32 * AHEAD;  // a warp's pairs stay in registers
    int tokens[AHEAD], experts[AHEAD], ranks[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) tokens[i] = (begin + 32 * i + lane) / K;  // early: divisions are slow
    for (int i = thread; i < WARPS * E; i += THREADS) counts[i] = 0;
    __syncthreads();
    if (!WAIT_LATE) wait_for_predecessor();
    let_successor_start();

    const int limit = pair_limit(num_tokens, P, K);
    int* mine = counts + warp * E;
    for (int first = begin; first < end; first += 32 * AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int pair = first + 32 * i + lane;
            experts[i] = pair < end ? expert_of(ids, expert_map, pair, limit, E_ids) : -1;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (first + 32 * i >= end) break;
            const int pair = first + 32 * i + lane;
            ranks[i] = rank_in_warp(experts[i], mine, bits);
            if (!held && pair < end) inverse[pair] = experts[i] >= 0 ? ranks[i] : -1;
        }
    }
    __syncthreads();

    int total = 0;
    if (thread < E) {
        constexpr int STEP = WARPS < 8 ? WARPS : 8;
        for (int w = 0; w < WARPS; w += STEP) {
            int n[STEP];
#pragma unroll
            for (int i = 0; i < STEP; ++i) n[i] = counts[(w + i) * E + thread];
#pragma unroll
            for (int i = 0; i < STEP; ++i) {
                counts[(w + i) * E + thread] = total;
                total += n[i];
            }
        }
    }
    int before = 0, rows = total;
    if (PARTED || CLUSTER > 1) {
        rows = 0;
        if (thread < E) here[thread] = total;
        sync_cluster();
        if (thread < E) {
#pragma unroll 8
            for (int r = 0; r < blocks; ++r) {
                const int n = PARTED ? counts_of_parts[r * E + thread] : read_from(here + thread, r);
                before += r < rank ? n : 0;
                rows += n;
            }
        }
    }
    // rows in the low half, tiles in the high one
    const int parts = rows <= tile_rows ? rows > 0 : (rows + tile_rows - 1) / tile_rows;
    const u64 start = scan_once(static_cast<u64>(parts) << 32 | static_cast<u32>(rows), sums);
    const int offset = static_cast<int>(start), tile = static_cast<int>(start >> 32);
    if (thread < E) base[thread] = offset + before;
    arrive_in_cluster();       // this block has read the counts of the other blocks
    if (rank == blocks - 1) {  // the block with the fewest pairs
        if (thread == E - 1) {
            num_tiles[0] = tile + parts;
            num_tiles[1] = 0;
        }
        const int granules = (rows + GRANULE - 1) / GRANULE;
        const int each = parts > 1 ? granules / parts : granules, more = granules - each * parts;
        for (int i = 0, first = 0; i < parts; ++i) {
            const int n = min((each + (i < more)) * GRANULE, rows - first);
            tiles[tile + i] = Tile{thread, offset + first, n, 0};
            first += n;
        }
    }
    __syncthreads();

    if (held) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int pair = begin + 32 * i + lane;
            if (pair >= end) break;
            const int e = experts[i];
            const int row = e >= 0 ? base[e] + mine[e] + ranks[i] : -1;
            inverse[pair] = row;
            if (e >= 0) row_tokens[row] = tokens[i];
        }
    } else {
#pragma unroll 4
        for (int pair = begin + lane; pair < end; pair += 32) {
            const int e = expert_of(ids, expert_map, pair, limit, E_ids);
            if (e < 0) continue;
            const int row = base[e] + mine[e] + inverse[pair];
            inverse[pair] = row;
            row_tokens[row] = pair / K;
        }
    }
    wait_for_cluster();
    if (WAIT_LATE) wait_for_predecessor();
}
