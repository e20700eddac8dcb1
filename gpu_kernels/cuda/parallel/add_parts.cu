// x[t] += sum over ranks of part[t], the same bits on every rank: fp32, in ascending rank, then x, one rounding.
//
// | argument | shape  | dtype      |                                                               |
// |----------|--------|------------|---------------------------------------------------------------|
// | part     | [T, H] | bf16, fp16 | of this rank; row-major, 8 bytes                               |
// | x        | [T, H] | as part    | in, out; the same on every rank; row-major, 8 bytes            |
// | heap     |        |            | of this rank: see parallel/heap.cuh                            |
// | rank     |        | int32      | of 0 .. RANKS - 1                                              |
// | capacity |        | int32      | of the heap, in 16 bytes; at least T H / 4                     |
//
// | T        |        | int32      |                                                                |
//
// SIZE: H, a multiple of 4. Blocks: T, or with MANY any number, all resident; threads: THREADS. A block sends its rows
// to every other rank and waits for theirs. One hop, 4 bytes a rank and element. A rank that waits in vain leaves x as
// it is.
#include "parallel/heap.cuh"

#ifndef SIZE
#define SIZE 2048
#endif
#ifndef THREADS
#define THREADS 512
#endif
#ifndef MANY
#define MANY 0
#endif

constexpr int CHUNKS = SIZE / 4, EACH = (CHUNKS + THREADS - 1) / THREADS;
static_assert(SIZE % 4 == 0, "a put is four elements");

struct Row {
    uint2 data[EACH];

    __device__ __forceinline__ void load(const u16* from, int t) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int c = threadIdx.x + i * THREADS;
            if (c < CHUNKS) data[i] = reinterpret_cast<const uint2*>(from)[static_cast<u64>(t) * CHUNKS + c];
        }
    }
};

__device__ __forceinline__ void add(float (&sum)[4], uint2 data) {
    sum[0] += first_of(data.x);
    sum[1] += second_of(data.x);
    sum[2] += first_of(data.y);
    sum[3] += second_of(data.y);
}

__device__ __forceinline__ void put_row(const Ranks& ranks, const Row& own, int t) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int c = threadIdx.x + i * THREADS;
        if (c < CHUNKS) ranks.put(t * CHUNKS + c, own.data[i]);
    }
}

__device__ __forceinline__ void add_row(const Ranks& ranks, const Row& own, const Row& old, u16* x, int t) {
    uint2* const to = reinterpret_cast<uint2*>(x) + static_cast<u64>(t) * CHUNKS;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int c = threadIdx.x + i * THREADS;
        if (c >= CHUNKS) break;
        float sum[4] = {};
        bool whole = true;
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            uint2 data = own.data[i];
            if (r != ranks.rank) whole &= ranks.take(r, t * CHUNKS + c, data);
            add(sum, data);
        }
        add(sum, old.data[i]);
        if (whole) to[c] = make_uint2(pack(sum[0], sum[1]), pack(sum[2], sum[3]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    add_parts(const u16* part, u16* x, Heap* heap, int rank, int capacity, int T) {
    Ranks ranks(heap, rank, capacity);
    Row own, old;
    wait_for_predecessor();
    let_successor_start();
    ranks.begin();
#if MANY
    for (int t = blockIdx.x; t < T; t += gridDim.x) {
        own.load(part, t);
        put_row(ranks, own, t);
    }
    for (int t = blockIdx.x; t < T; t += gridDim.x) {
        own.load(part, t);
        old.load(x, t);
        add_row(ranks, own, old, x, t);
    }
#else
    own.load(part, blockIdx.x);
    old.load(x, blockIdx.x);
    put_row(ranks, own, blockIdx.x);
    add_row(ranks, own, old, x, blockIdx.x);
#endif
    ranks.end();
}
