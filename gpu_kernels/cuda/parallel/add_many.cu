// SPDX-License-Identifier: Apache-2.0
// As add_parts, of many rows, bound by the link: 2 bytes a rank and element, and a flag for each tile of TILE
// rows.
//
// | argument | shape  | dtype      |                                                                |
// |----------|--------|------------|----------------------------------------------------------------|
// | part     | [T, H] | bf16, fp16 | of this rank; row-major, 16 bytes                              |
// | x        | [T, H] | as part    | in, out; the same on every rank; row-major, 16 bytes           |
// | heap     |        |            | of this rank: see parallel/heap.cuh                            |
// | rank, capacity, T |  | int32     | capacity: of the heap's words, in 16 bytes                     |
// | room     |        | int32      | of the heap's rows, in 16 bytes; at least T H / 8              |
//
// SIZE: H, a multiple of 8. Blocks: two a multiprocessor at most; threads: THREADS. T: at most TILE * TILES.
// A block puts all of its tiles before it waits for the first. A rank that waits in vain leaves x as it is.
#include "parallel/heap.cuh"

#ifndef SIZE
#define SIZE 2048
#endif
#ifndef THREADS
#define THREADS 512
#endif
#ifndef TILE
#define TILE 8
#endif

constexpr int VECTORS = SIZE / 8;
constexpr int AHEAD = RANKS > 4 ? 2 : 4;  // vectors of a thread in flight
static_assert(SIZE % 8 == 0, "a vector is eight elements");

__device__ __forceinline__ void add(float (&sum)[8], uint4 v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] += first_of(words[i]);
        sum[2 * i + 1] += second_of(words[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    add_many(const u16* part, u16* x, Heap* heap, int rank, int capacity, int T, int room) {
    Ranks ranks(heap, rank, capacity);
    const int tiles = (T + TILE - 1) / TILE;
    const uint4* const parts = reinterpret_cast<const uint4*>(part);
    uint4* const sums = reinterpret_cast<uint4*>(x);
    wait_for_predecessor();
    let_successor_start();
    ranks.begin();
    const u64 mine = ranks.rows(rank, room);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int end = min(T, (tile + 1) * TILE) * VECTORS;
        for (int first = tile * TILE * VECTORS + threadIdx.x; first < end; first += AHEAD * THREADS) {
            uint4 data[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i)
                if (first + i * THREADS < end) data[i] = parts[first + i * THREADS];
#pragma unroll
            for (int r = 0; r < RANKS; ++r)
#pragma unroll
                for (int i = 0; i < AHEAD; ++i)
                    if (r != rank && first + i * THREADS < end)
                        store_put(ranks.peers[r] + mine + static_cast<u64>(first + i * THREADS) * 16,
                                  data[i]);
        }
        __syncthreads();
        if (threadIdx.x == 0)
#pragma unroll
            for (int r = 0; r < RANKS; ++r)
                if (r != rank) store_flag(ranks.peers[r] + ranks.flag(rank, tile), ranks.call);
    }
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        bool lost = false;
        if (threadIdx.x == 0)
            for (int r = 0; r < RANKS; ++r)
                if (r != rank) lost |= !ranks.await(r, tile);
        if (__syncthreads_or(lost)) break;
        const int end = min(T, (tile + 1) * TILE) * VECTORS;
        for (int first = tile * TILE * VECTORS + threadIdx.x; first < end; first += AHEAD * THREADS) {
            float sum[AHEAD][8] = {};
#pragma unroll
            for (int r = 0; r <= RANKS; ++r) {
                uint4 data[AHEAD];
                const u64 from = reinterpret_cast<u64>(heap) + ranks.rows(r < RANKS ? r : 0, room);
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    const int v = first + i * THREADS;
                    if (v >= end) break;
                    data[i] = r == RANKS  ? sums[v]
                              : r == rank ? parts[v]
                                          : load_put(from + static_cast<u64>(v) * 16);
                }
#pragma unroll
                for (int i = 0; i < AHEAD; ++i)
                    if (first + i * THREADS < end) add(sum[i], data[i]);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i)
                if (first + i * THREADS < end)
                    sums[first + i * THREADS] =
                        make_uint4(pack(sum[i][0], sum[i][1]), pack(sum[i][2], sum[i][3]),
                                   pack(sum[i][4], sum[i][5]), pack(sum[i][6], sum[i][7]));
        }
    }
    ranks.end();
}
