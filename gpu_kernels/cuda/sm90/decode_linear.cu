// SPDX-License-Identifier: Apache-2.0
// A linear layer of a decode step, with the RMSNorm before it or the residual sum after it: bound by reading
// the weight. out[t] = (NORM ? rms_norm(x[t]) * norm : x[t]) weight^T (+ residual[t])
//
// | argument | shape  | dtype      |                                                                        |
// |----------|--------|------------|------------------------------------------------------------------------|
// | weight   | (K, N) | bf16, fp16 | tensor map, innermost dimension first; a box is 64 by 64               |
// | x        | (K, T) | as weight  | tensor map; a box is 64 by ROWS                                        |
// | norm     | [K]    | as weight  | NORM: of RMSNorm; 16 bytes                                             |
// | residual | [T, N] | as weight  | ADD; row-major, 8 bytes; may be out                                    |
// | out      | [T, N] | as weight  | out; row-major, 8 bytes; rounded once                                  |
//
// K is a multiple of 64 * SPLITS, N of 64; T <= ROWS. A cluster of SPLITS blocks makes 64 columns of out. A
// block multiplies its part of K, in steps of 64 through a ring of STAGES stages: 64 rows of the weight are
// the M side, x is the N side. It requests the weights of all stages before it waits for x. A block finishes
// 64 / SPLITS columns: blocks send it their fp32 sums, a barrier counts the bytes, and parts are added in
// ascending order of K. x * norm is rounded to the dtype of x; everything else is fp32.
//
// Threads: 128 that multiply, then one warp that loads. Blocks: N / 64 * SPLITS. Shared memory: stages of
// weights [64, 64] and rows [ROWS, 64], both swizzled by 128 bytes, later this block's sums; sums of other
// blocks, with more than 64 ROWS also in place of stages; squares; this block's part of norm; barriers.
#ifndef SPLITS
#define SPLITS 4
#endif
#define CLUSTER SPLITS

#include "common/cluster.cuh"
#include "common/rows.cuh"
#include "sm90/ptx.cuh"
#include "sm90/ring.cuh"
#include "sm90/wgmma.cuh"

#ifndef ROWS
#define ROWS 8
#endif
#ifndef STAGES
#define STAGES 6
#endif
#ifndef NORM
#define NORM 0
#endif
#ifndef ADD
#define ADD 0
#endif

constexpr int K_BLOCK = 64, TILE = 64, THREADS = 128;
constexpr int WEIGHT_BYTES = TILE * K_BLOCK * 2, ROW_BYTES = ROWS * K_BLOCK * 2;
constexpr int STAGE_BYTES = WEIGHT_BYTES + ROW_BYTES;
constexpr int OWN = TILE / SPLITS;  // columns that a block finishes
constexpr int STRIDE = ROWS + 4;  // floats of a column: two lanes share a bank when sums are stored and read
// sums of other blocks take the place of stages, too: room for more stages; blocks then send when all of a
// cluster have multiplied
constexpr bool INSIDE = ROWS > 64;
constexpr int PART_BYTES = OWN * STRIDE * 4, SQUARES_BYTES = NORM ? ROWS * 4 : 0;
constexpr int FOURS = OWN / 4;
constexpr int ITEMS = (ROWS * FOURS + THREADS - 1) / THREADS;  // a thread's fours of columns

static_assert(ROWS % 8 == 0 && ROWS <= 192, "the N side of a product");
static_assert(SPLITS >= 2 && SPLITS <= 8 && STAGES >= 2, "blocks that send, and a stage to fill");
static_assert(STAGES * STAGE_BYTES >= (INSIDE ? 2 : 1) * SPLITS * PART_BYTES, "sums in place of stages");

struct Shared {
    u32 stages, parts, squares, parts_full, full, empty, rows_full, norms;

    __device__ __forceinline__ explicit Shared(const void* memory) {
        stages = (shared_address(memory) + 1023) / 1024 * 1024;
        parts = stages + (INSIDE ? SPLITS * PART_BYTES : STAGES * STAGE_BYTES);
        squares = INSIDE ? stages + STAGES * STAGE_BYTES : parts + SPLITS * PART_BYTES;
        parts_full = squares + (SPLITS + 1) * SQUARES_BYTES;
        full = parts_full + 16;
        empty = full + STAGES * 8;
        rows_full = NORM ? empty + STAGES * 8 : full;  // else weights and rows of a stage have one barrier
        norms = (rows_full + STAGES * 8 + 8) / 16 * 16;
    }
    __device__ __forceinline__ u32 weights(int stage) const { return stages + stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 rows(int stage) const { return weights(stage) + WEIGHT_BYTES; }
    // this block's sums of a column, in place of the stages
    __device__ __forceinline__ u32 sums(int column, int t) const {
        return stages + (column * STRIDE + t) * 4;
    }
    // what block `from` sends to this one
    __device__ __forceinline__ u32 part(int from) const { return parts + from * PART_BYTES; }
    __device__ __forceinline__ u32 squares_of(int from) const { return squares + from * SQUARES_BYTES; }
    __device__ __forceinline__ u32 own_squares() const { return squares_of(SPLITS); }
};

__device__ __forceinline__ float load_float(u32 from) { return __uint_as_float(load_word(from)); }

// One thread: the weights of a step. Without norm the barrier also counts the bytes of the rows.
__device__ __forceinline__ void load_weights(const Shared& shared, const TensorMap* weight, int stage, int k,
                                             int tile) {
    barrier_arrive_expect(shared.full + 8 * stage, NORM ? WEIGHT_BYTES : STAGE_BYTES);
    tensor_load_2d(shared.weights(stage), weight, shared.full + 8 * stage, k, tile);
}

__device__ __forceinline__ void load_rows(const Shared& shared, const TensorMap* x, int stage, int k) {
    if (NORM) barrier_arrive_expect(shared.rows_full + 8 * stage, ROW_BYTES);
    tensor_load_2d(shared.rows(stage), x, shared.rows_full + 8 * stage, k, 0);
}

// One thread: all of a block's loads but those of load_weights that came before.
__device__ __forceinline__ void load_rest(const Shared& shared, const TensorMap* weight, const TensorMap* x,
                                          int ahead, int steps, int first_k, int tile) {
    for (int step = 0; step < ahead; ++step) load_rows(shared, x, step, first_k + step * K_BLOCK);
    Turn<STAGES> free;
    for (int step = STAGES; step < steps; ++step, free.next()) {
        barrier_wait(shared.empty + 8 * free.at, free.parity);
        load_weights(shared, weight, free.at, first_k + step * K_BLOCK, tile);
        load_rows(shared, x, free.at, first_k + step * K_BLOCK);
    }
}

#if NORM
constexpr int CHUNKS = (ROW_BYTES / 16 + THREADS - 1) / THREADS;  // a thread's 16 bytes of a step's rows

// Rows of a stage times their part of norm, in place. A thread has one chunk of every 16th row; squares: sums
// of its elements.
__device__ __forceinline__ void scale_rows(u32 rows, u32 norms, float (&squares)[CHUNKS]) {
    const int own = threadIdx.x / 8;
    const uint4 gain = load_16(norms + ((threadIdx.x % 8) ^ (own % 8)) * 16);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        if (ROWS % 16 && own + 16 * i >= ROWS) break;
        const u32 at = rows + threadIdx.x * 16 + i * THREADS * 16;
        const uint4 words = load_16(at);
        squares[i] = dot(words, words, squares[i]);
        store_16(at, times(words, gain));
    }
}

__device__ __forceinline__ void store_squares(u32 to, float (&squares)[CHUNKS]) {
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        float sum = squares[i];
#pragma unroll
        for (int step = 4; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        const int t = threadIdx.x / 8 + 16 * i;
        if (threadIdx.x % 8 == 0 && t < ROWS) store_float(to + t * 4, sum);
    }
}
#endif

// A thread's sums are of columns 16 * warp + lane / 4 and 8 more, tokens 8 j + 2 * (lane % 4) and the next.
__device__ __forceinline__ void store_sums(const Shared& shared, const float (&sums)[ROWS / 2]) {
    const int column = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            store_two(shared.sums(column + 8 * half, 8 * j + token), sums[4 * j + 2 * half],
                      sums[4 * j + 2 * half + 1]);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32)
    decode_linear(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,
                  const u16* norm, const u16* residual, u16* out, float eps, int T, int N, int K) {
    const Shared shared(dynamic_memory());
    const int rank = rank_in_cluster(), tile = blockIdx.x / SPLITS * TILE;
    const int steps = K / (K_BLOCK * SPLITS), first_k = rank * steps * K_BLOCK;
    const int ahead = steps < STAGES ? steps : STAGES, thread = threadIdx.x;
    if (thread == THREADS) {
        prefetch_map(&weight);
        prefetch_map(&x);
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(shared.full + 8 * stage, 1);
            barrier_init(shared.empty + 8 * stage, 4);
            if (NORM) barrier_init(shared.rows_full + 8 * stage, 1);
        }
        barrier_init(shared.parts_full, 1);
        barrier_init_fence();
        barrier_arrive_expect(shared.parts_full, (SPLITS - 1) * (PART_BYTES + SQUARES_BYTES));
        for (int step = 0; step < ahead; ++step)
            load_weights(shared, &weight, step, first_k + step * K_BLOCK, tile);
    }
#if NORM
    for (int i = thread; i < steps * 8; i += THREADS + 32)
        store_16(shared.norms + i * 16, reinterpret_cast<const uint4*>(norm + first_k)[i]);
#endif
    __syncthreads();
    if (!INSIDE || thread >= THREADS) arrive_in_cluster();  // else once it has multiplied
    wait_for_predecessor();
    let_successor_start();

    if (thread >= THREADS) {
        if (thread == THREADS) load_rest(shared, &weight, &x, ahead, steps, first_k, tile);
        __syncwarp();
        wait_for_cluster();
        arrive_in_cluster();
    } else {
#if ADD
        uint2 old[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int item = i * THREADS + thread, t = item / FOURS;
            const u64 at = static_cast<u64>(t) * N + tile + rank * OWN + item % FOURS * 4;
            old[i] = t < T ? *reinterpret_cast<const uint2*>(residual + at) : make_uint2(0, 0);
        }
#endif
        float sums[ROWS / 2];
        Turn<STAGES> next;
        u32 before = 0;  // barrier of the stage whose products may not have ended
#if NORM
        float squares[CHUNKS] = {};
        for (int step = 0; step < ahead; ++step) {  // their rows come together
            barrier_wait(shared.rows_full + 8 * step, 0);
            scale_rows(shared.rows(step), shared.norms + step * 128, squares);
        }
        fence_async_proxy();
        named_sync(1, THREADS);
#endif
        for (int step = 0; step < steps; ++step, next.next()) {
#if NORM
            if (step >= STAGES) {
                barrier_wait(shared.rows_full + 8 * next.at, next.parity);
                scale_rows(shared.rows(next.at), shared.norms + step * 128, squares);
                fence_async_proxy();
                named_sync(1, THREADS);
            }
#endif
            barrier_wait(shared.full + 8 * next.at, next.parity);
            products_begin();
            products<ROWS>(sums, operand(shared.weights(next.at)), operand(shared.rows(next.at)), step > 0);
            products_commit();
            products_wait<1>();
            if (step > 0 && thread % 32 == 0) barrier_arrive(before);
            before = shared.empty + 8 * next.at;
        }
        products_wait<0>();
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) sum_here(sums[i]);
        named_sync(1, THREADS);  // no warp reads the stages
        if (INSIDE) arrive_in_cluster();
        store_sums(shared, sums);
#if NORM
        store_squares(shared.own_squares(), squares);
#endif
        fence_async_proxy();
        wait_for_cluster();
        named_sync(1, THREADS);
        if (thread < SPLITS && thread != rank) {
            send_bytes(shared.sums(thread * OWN, 0), shared.part(rank), thread, shared.parts_full,
                       PART_BYTES);
            if (NORM)
                send_bytes(shared.own_squares(), shared.squares_of(rank), thread, shared.parts_full,
                           SQUARES_BYTES);
        }
        barrier_wait(shared.parts_full, 0);
        arrive_in_cluster();
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int item = i * THREADS + thread, t = item / FOURS, column = item % FOURS * 4;
            if (t < T) {
                float total[4] = {}, squared = 0.0f;
#pragma unroll
                for (int from = 0; from < SPLITS; ++from) {
                    const u32 part = from == rank ? shared.sums(rank * OWN, 0) : shared.part(from);
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        total[j] += load_float(part + ((column + j) * STRIDE + t) * 4);
                    if (NORM)
                        squared += load_float(
                            (from == rank ? shared.own_squares() : shared.squares_of(from)) + t * 4);
                }
#if NORM
                const float scale = rsqrtf(squared / K + eps);
                for (float& sum : total) sum *= scale;
#endif
#if ADD
                total[0] += first_of(old[i].x), total[1] += second_of(old[i].x);
                total[2] += first_of(old[i].y), total[3] += second_of(old[i].y);
#endif
                *reinterpret_cast<uint2*>(out + static_cast<u64>(t) * N + tile + rank * OWN + column) =
                    make_uint2(pack(total[0], total[1]), pack(total[2], total[3]));
            }
        }
        __syncwarp();
    }
    wait_for_cluster();  // others have what this block sent
}
