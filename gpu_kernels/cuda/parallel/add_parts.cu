// SPDX-License-Identifier: Apache-2.0
// x[t] += sum over ranks of part[t], the same bits on every rank: fp32, in ascending rank, then x, one
// rounding.
//
// | argument | shape  | dtype      |                                                               |
// |----------|--------|------------|---------------------------------------------------------------|
// | part     | [T, H] | bf16, fp16 | of this rank; row-major, 8 bytes                               |
// | x        | [T, H] | as part    | in, out; the same on every rank; row-major, 8 bytes            |
// | heap     |        |            | of this rank: see parallel/heap.cuh                            |
// | rank     |        | int32      | of 0 .. RANKS - 1                                              |
// | capacity |        | int32      | of the heap, in 16 bytes; at least T H / 4                     |
//
//
// SIZE: H, a multiple of 4. Blocks: T, all resident; threads: THREADS. A block sends its row to every other
// rank and waits for theirs. One hop, 4 bytes a rank and element. A rank that waits in vain leaves x as it
// is.
#include "parallel/heap.cuh"

#ifndef SIZE
#define SIZE 2048
#endif
#ifndef THREADS
#define THREADS 512
#endif

constexpr int CHUNKS = SIZE / 4, EACH = (CHUNKS + THREADS - 1) / THREADS;
static_assert(SIZE % 4 == 0, "a put is four elements");

__device__ __forceinline__ void add(float (&sum)[4], uint2 data) {
    sum[0] += first_of(data.x);
    sum[1] += second_of(data.x);
    sum[2] += first_of(data.y);
    sum[3] += second_of(data.y);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    add_parts(const u16* part, u16* x, Heap* heap, int rank, int capacity) {
    Ranks ranks(heap, rank, capacity);
    const int first = blockIdx.x * CHUNKS;
    const uint2* const parts = reinterpret_cast<const uint2*>(part) + first;
    uint2* const sums = reinterpret_cast<uint2*>(x) + first;
    wait_for_predecessor();
    let_successor_start();
    ranks.begin();
    uint2 own[EACH], old[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int c = threadIdx.x + i * THREADS;
        if (c < CHUNKS) own[i] = parts[c];
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int c = threadIdx.x + i * THREADS;
        if (c < CHUNKS) old[i] = sums[c];
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int c = threadIdx.x + i * THREADS;
        if (c < CHUNKS) ranks.put(first + c, own[i]);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int c = threadIdx.x + i * THREADS;
        if (c >= CHUNKS) break;
        float sum[4] = {};
        bool whole = true;
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            uint2 data = own[i];
            if (r != rank) whole &= ranks.take(r, first + c, data);
            add(sum, data);
        }
        add(sum, old[i]);
        if (whole) sums[c] = make_uint2(pack(sum[0], sum[1]), pack(sum[2], sum[3]));
    }
    ranks.end();
}
