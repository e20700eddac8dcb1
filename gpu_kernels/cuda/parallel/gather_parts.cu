// SPDX-License-Identifier: Apache-2.0
// out[t] = part[t] of every rank, one after the other, in ascending rank.
//
// | argument | shape    | dtype      |                                                             |
// |----------|----------|------------|-------------------------------------------------------------|
// | part     | [T, n]   | bf16, fp16 | of this rank; row-major, 8 bytes                             |
// | out      | [T, R n] | as part    | out; row-major, 8 bytes                                      |
// | heap     |          |            | of this rank: see parallel/heap.cuh                          |
// | T, n     |          | int32      | n: a multiple of 4                                           |
// | rank     |          | int32      | of 0 .. RANKS - 1                                            |
// | capacity |          | int32      | of the heap, in 16 bytes; at least T n / 4                   |
//
// Blocks: ceil(T n / 4 / THREADS / EACH), at most BLOCKS, all resident; threads: THREADS. A rank that waits
// in vain leaves elements of out as they are.
#include "parallel/heap.cuh"

#ifndef THREADS
#define THREADS 512
#endif
#ifndef EACH
#define EACH 4  // chunks of a thread in flight
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_parts(const u16* part, u16* out, Heap* heap, int T, int n, int rank, int capacity) {
    Ranks ranks(heap, rank, capacity);
    const int row = n / 4, chunks = T * row, first = blockIdx.x * THREADS * EACH + threadIdx.x;
    const uint2* const parts = reinterpret_cast<const uint2*>(part);
    uint2* const whole = reinterpret_cast<uint2*>(out);
    wait_for_predecessor();
    let_successor_start();
    ranks.begin();
    uint2 own[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (first + i * THREADS < chunks) own[i] = parts[first + i * THREADS];
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (first + i * THREADS < chunks) ranks.put(first + i * THREADS, own[i]);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int c = first + i * THREADS;
        if (c >= chunks) break;
        const u64 at = static_cast<u64>(c / row) * RANKS * row + c % row;
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            uint2 data = own[i];
            if (r == rank || ranks.take(r, c, data)) whole[at + r * row] = data;
        }
    }
    ranks.end();
}
