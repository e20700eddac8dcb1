// SPDX-License-Identifier: Apache-2.0
// Pairs of each expert in each part of one routing: what the blocks of routing_sort need of one another where
// they are no cluster.
//
// | argument   | shape      | dtype      |                                                        |
// |------------|------------|------------|--------------------------------------------------------|
// | ids, expert_map, num_tokens |  |  | as routing_sort                                                 |
// | counts     | [blocks, E] | int32, out | part b: the pairs that block b of routing_sort sorts   |
//
// P = T*K. Blocks of THREADS threads, both as of routing_sort. Dynamic shared memory: E * 4 bytes.
#include "common/routing.cuh"

#ifndef THREADS
#define THREADS 1024
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    routing_count(const Id* ids, const int* expert_map, const int* num_tokens, int* counts, int P, int E_ids,
                  int E, int K) {
    int* here = reinterpret_cast<int*>(dynamic_memory());
    for (int e = threadIdx.x; e < E; e += THREADS) here[e] = 0;
    __syncthreads();
    wait_for_predecessor();
    let_successor_start();
    const int limit = pair_limit(num_tokens, P, K), part = part_of(P, THREADS * gridDim.x) * THREADS / 32;
    const int begin = blockIdx.x * part, end = min(begin + part, P);
    for (int pair = begin + threadIdx.x; pair < end; pair += THREADS) {
        const int e = expert_of(ids, expert_map, pair, limit, E_ids);
        if (e >= 0) atomicAdd(here + e, 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += THREADS) counts[blockIdx.x * E + e] = here[e];
}
