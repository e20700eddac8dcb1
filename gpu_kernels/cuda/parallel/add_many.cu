// SPDX-License-Identifier: Apache-2.0
// As add_parts, of many rows, bound by the link, in two hops: each rank sums its own columns, and sends the
// sums to the others. 4 (R - 1) / R bytes an element leave a rank, and as many arrive.
//
// | argument | shape  | dtype      |                                                                |
// |----------|--------|------------|----------------------------------------------------------------|
// | part     | [T, H] | bf16, fp16 | of this rank; row-major, 16 bytes                              |
// | x        | [T, H] | as part    | in, out; the same on every rank; row-major, 16 bytes           |
// | heap     |        |            | of this rank: see parallel/heap.cuh                            |
// | rank, capacity, T |  | int32     | capacity: of the heap's words, in 16 bytes                     |
// | room     |        | int32      | of the heap's rows, in 16 bytes; at least T H / 8              |
// | tile     |        | int32      | rows that share a flag; T is at most tile * TILES              |
//
// SIZE: H, a multiple of 8. Blocks: two a multiprocessor at most; threads: THREADS. A block puts the parts of
// all its tiles, then sums its columns of all, then takes the sums of the others. So no block waits for one
// that waits for it. A rank that waits in vain leaves columns of x as they are.
#include "parallel/heap.cuh"

#ifndef SIZE
#define SIZE 2048
#endif
#ifndef THREADS
#define THREADS 512
#endif

constexpr int VECTORS = SIZE / 8;
constexpr int AHEAD = RANKS > 4 ? 1 : 2;  // vectors of a thread and rank in flight
static_assert(SIZE % 8 == 0, "a vector is eight elements");

// The columns that a rank sums, in vectors.
__device__ __forceinline__ int first_of_rank(int r) { return VECTORS * r / RANKS; }

struct Slice {
    int first, wide, rows;

    __device__ __forceinline__ Slice(int rank, int rows)
        : first(first_of_rank(rank)),
          wide(VECTORS % RANKS ? first_of_rank(rank + 1) - first : VECTORS / RANKS),
          rows(rows) {}
    __device__ __forceinline__ bool has(int i) const { return i < wide * rows; }
    __device__ __forceinline__ int at(int i) const { return i / wide * VECTORS + first + i % wide; }
};

__device__ __forceinline__ void add(float (&sum)[8], uint4 v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] += first_of(words[i]);
        sum[2 * i + 1] += second_of(words[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    add_many(const u16* part, u16* x, Heap* heap, int rank, int capacity, int T, int room, int tile) {
    Ranks ranks(heap, rank, capacity);
    const int tiles = (T + tile - 1) / tile;
    // a warp's first lanes say to the others, or wait until they say, that a tile is there
    const int other = threadIdx.x, widest = (VECTORS / RANKS + 1) * tile;
    const bool speaks = other < RANKS && other != rank;
    const uint4* const parts = reinterpret_cast<const uint4*>(part);
    uint4* const sums = reinterpret_cast<uint4*>(x);
    wait_for_predecessor();
    let_successor_start();
    ranks.begin();
    const u64 mine = ranks.rows(rank, room);
    for (int n = blockIdx.x; n < tiles; n += gridDim.x) {
        const int row = n * tile, rows = min(tile, T - row);
        for (int i = threadIdx.x; i < widest; i += AHEAD * THREADS) {
            uint4 data[RANKS][AHEAD];
#pragma unroll
            for (int r = 0; r < RANKS; ++r)
#pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    const Slice slice(r, rows);
                    if (r != rank && slice.has(i + a * THREADS))
                        data[r][a] = parts[row * VECTORS + slice.at(i + a * THREADS)];
                }
#pragma unroll
            for (int r = 0; r < RANKS; ++r)
#pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    const Slice slice(r, rows);
                    if (r != rank && slice.has(i + a * THREADS))
                        store_put(ranks.peers[r] + mine +
                                      static_cast<u64>(row * VECTORS + slice.at(i + a * THREADS)) * 16,
                                  data[r][a]);
                }
        }
        __syncthreads();
        if (speaks) store_flag(heap->peers[other] + ranks.flag(rank, n, 0), ranks.call);
    }
    for (int n = blockIdx.x; n < tiles; n += gridDim.x) {
        if (__syncthreads_or(speaks && !ranks.await(other, n, 0))) break;
        const int row = n * tile;
        const Slice slice(rank, min(tile, T - row));
        for (int i = threadIdx.x; slice.has(i); i += AHEAD * THREADS) {
            uint4 data[RANKS + 1][AHEAD];
#pragma unroll
            for (int r = 0; r <= RANKS; ++r) {
                const u64 from = reinterpret_cast<u64>(heap) + ranks.rows(r < RANKS ? r : 0, room);
#pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    if (!slice.has(i + a * THREADS)) break;
                    const int v = row * VECTORS + slice.at(i + a * THREADS);
                    data[r][a] = r == RANKS  ? sums[v]
                                 : r == rank ? parts[v]
                                             : load_put(from + static_cast<u64>(v) * 16);
                }
            }
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                if (!slice.has(i + a * THREADS)) break;
                const int v = row * VECTORS + slice.at(i + a * THREADS);
                float sum[8] = {};
#pragma unroll
                for (int r = 0; r <= RANKS; ++r) add(sum, data[r][a]);
                const uint4 whole = make_uint4(pack(sum[0], sum[1]), pack(sum[2], sum[3]),
                                               pack(sum[4], sum[5]), pack(sum[6], sum[7]));
                sums[v] = whole;
#pragma unroll
                for (int r = 0; r < RANKS; ++r)
                    if (r != rank) store_put(ranks.peers[r] + mine + static_cast<u64>(v) * 16, whole);
            }
        }
        __syncthreads();
        if (speaks) store_flag(heap->peers[other] + ranks.flag(rank, n, 1), ranks.call);
    }
    for (int n = blockIdx.x; n < tiles; n += gridDim.x) {
        if (__syncthreads_or(speaks && !ranks.await(other, n, 1))) break;
        const int row = n * tile, rows = min(tile, T - row);
        for (int i = threadIdx.x; i < widest; i += AHEAD * THREADS) {
            uint4 data[RANKS][AHEAD];
#pragma unroll
            for (int r = 0; r < RANKS; ++r)
#pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    const Slice slice(r, rows);
                    if (r != rank && slice.has(i + a * THREADS))
                        data[r][a] =
                            load_put(reinterpret_cast<u64>(heap) + ranks.rows(r, room) +
                                     static_cast<u64>(row * VECTORS + slice.at(i + a * THREADS)) * 16);
                }
#pragma unroll
            for (int r = 0; r < RANKS; ++r)
#pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    const Slice slice(r, rows);
                    if (r != rank && slice.has(i + a * THREADS))
                        sums[row * VECTORS + slice.at(i + a * THREADS)] = data[r][a];
                }
        }
    }
    ranks.end();
}
