// SPDX-License-Identifier: Apache-2.0
// One routing as kernels read it: pairs p = t * K + k in [0, T*K).
#pragma once

#include "common/element.cuh"

#ifndef ID64
#define ID64 0  // 1: ids are int64
#endif

#if ID64
using Id = long long;
#else
using Id = int;
#endif

struct Tile {
    int expert, first, rows;  // sorted rows first .. first + rows - 1, all of one expert
    int done;                 // starts at 0; a kernel that makes a tile in parts counts them here
};

// Local expert of a pair. -1: the id names no expert, the expert lives on another device, or the token is
// padding.
__device__ __forceinline__ int expert_of(const Id* ids, const int* expert_map, int pair, int limit,
                                         int E_ids) {
    if (pair >= limit) return -1;
    Id id = ids[pair];
    if (id < 0 || id >= E_ids) return -1;
    return expert_map ? expert_map[id] : static_cast<int>(id);
}

__device__ __forceinline__ int pair_limit(const int* num_tokens, int P, int K) {
    if (!num_tokens) return P;
    return static_cast<int>(min(static_cast<long long>(max(*num_tokens, 0)) * K, static_cast<long long>(P)));
}

// Pairs of each warp, a multiple of 32, where so many threads share P pairs.
__device__ __forceinline__ int part_of(int P, int threads) { return (P + threads - 1) / threads * 32; }
