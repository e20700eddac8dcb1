// SPDX-License-Identifier: Apache-2.0
// A linear layer of few rows, with the RMSNorm before it or the residual sum after it: bound by reading the
// weight. out[t] = (NORM ? rms_norm(x[t]) * norm : x[t]) weight^T (+ residual[t])
//
// | argument | shape  | dtype      |                                                          |
// |----------|--------|------------|----------------------------------------------------------|
// | weight   | (K, N) | bf16, fp16 | tensor map, innermost dimension first; 64 by 64 a box    |
// | x        | [T, K] | as weight  | row-major, 16 bytes                                      |
// | norm     | [K]    | as weight  | NORM: of RMSNorm                                         |
// | residual | [T, N] | as weight  | ADD; row-major, 8 bytes; may be out                      |
// | out      | [T, N] | as weight  | out; row-major, 8 bytes                                  |
//
// K = 512 * SPLITS, SPLITS <= 8; N is a multiple of 64; T <= MAX_T. Blocks: N / 64 * SPLITS of 128 threads. A
// cluster of SPLITS blocks makes 64 columns of out (split K): each block sums over 512 elements of K. The
// blocks then reduce 64 / SPLITS columns each, in ascending order of K. A block issues the loads of all its
// weights before it waits for x. 64 rows of the weight are the M side, x is the N side. x * norm is rounded
// to the dtype of x; everything else is fp32.
//
// Shared memory: weights 8 * [64, 64], x 8 * [MAX_T, 64], both swizzled by 128 bytes; sums; barriers.
#ifndef SPLITS
#define SPLITS 4
#endif
#define CLUSTER SPLITS

#include "common/cluster.cuh"
#include "common/rows.cuh"
#include "sm90/ptx.cuh"
#include "sm90/wgmma.cuh"

#ifndef MAX_T
#define MAX_T 8
#endif
#ifndef NORM
#define NORM 0
#endif
#ifndef ADD
#define ADD 0
#endif

static_assert(MAX_T % 8 == 0 && MAX_T <= 32, "x beside the weights in shared memory");

constexpr int STEPS = 8, K_BLOCK = 64, TILE = 64;
constexpr int WEIGHT_BYTES = TILE * K_BLOCK * 2, ROW_BYTES = MAX_T * K_BLOCK * 2;
constexpr int SUM_STRIDE = TILE + 4;    // floats of a token's sums: no two lanes of a store share a bank
constexpr int COLUMNS = TILE / SPLITS;  // of out that a block finishes
constexpr int ROWS_A_WARP = MAX_T / 4;

struct Shared {
    u32 weights, rows, squares, full;

    __device__ __forceinline__ explicit Shared(const void* memory) {
        weights = (shared_address(memory) + 1023) / 1024 * 1024;
        rows = weights + STEPS * WEIGHT_BYTES;
        squares = rows + STEPS * ROW_BYTES;
        full = squares + MAX_T * 4;
    }
    // in place of the weights, after their last use
    __device__ __forceinline__ u32 sums(int t, int column) const {
        return weights + (t * SUM_STRIDE + column) * 4;
    }
};

// Load this block's slice of x into shared memory. NORM: multiplied by norm, with the sums of squares. A warp
// takes every fourth row; a lane takes the 16-byte chunks `lane` and `lane + 32`.
__device__ __forceinline__ void load_rows(const Shared& shared, const u16* x, const uint4 (&norms)[2], int T,
                                          int K, int first_k) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint4 words[ROWS_A_WARP][2];
#pragma unroll
    for (int i = 0; i < ROWS_A_WARP; ++i) {
        const int t = warp + 4 * i;
        const uint4* from = reinterpret_cast<const uint4*>(x + static_cast<u64>(t) * K + first_k);
#pragma unroll
        for (int j = 0; j < 2; ++j) words[i][j] = t < T ? from[lane + 32 * j] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < ROWS_A_WARP; ++i) {
        const int t = warp + 4 * i;
#if NORM
        const float squares = warp_sum(dot(words[i][1], words[i][1], dot(words[i][0], words[i][0], 0.0f)));
        if (lane == 0) store_float(shared.squares + t * 4, squares);
#endif
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int chunk = lane + 32 * j;
            const u32 at = shared.rows + chunk / 8 * ROW_BYTES + t * 128 + ((chunk % 8) ^ (t % 8)) * 16;
            store_16(at, NORM ? times(words[i][j], norms[j]) : words[i][j]);
        }
    }
}

// A thread's sums are of channels 16 * warp + lane / 4 and 8 more, tokens 8 j + 2 * (lane % 4) and the next.
__device__ __forceinline__ void store_sums(const Shared& shared, const float (&sums)[MAX_T / 2]) {
    const int column = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < MAX_T / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            store_float(shared.sums(8 * j + token + i % 2, column + i / 2 * 8), sums[4 * j + i]);
}

extern "C" __global__ void __launch_bounds__(128)
    decode_linear(const __grid_constant__ TensorMap weight, const u16* x, const u16* norm,
                  const u16* residual, u16* out, float eps, int T, int N) {
    const Shared shared(dynamic_memory());
    constexpr int K = 512 * SPLITS;
    const int rank = rank_in_cluster(), tile = blockIdx.x / SPLITS * TILE, first_k = rank * 512;
    if (threadIdx.x == 0) {
        prefetch_map(&weight);
        for (int step = 0; step < STEPS; ++step) barrier_init(shared.full + 8 * step, 1);
        barrier_init_fence();
        for (int step = 0; step < STEPS; ++step) {
            barrier_arrive_expect(shared.full + 8 * step, WEIGHT_BYTES);
            tensor_load_2d(shared.weights + step * WEIGHT_BYTES, &weight, shared.full + 8 * step,
                           first_k + step * K_BLOCK, tile);
        }
    }
    uint4 norms[2] = {};
#if NORM
    for (int j = 0; j < 2; ++j)
        norms[j] = reinterpret_cast<const uint4*>(norm + first_k)[threadIdx.x % 32 + 32 * j];
#endif
    wait_for_predecessor();
    let_successor_start();
    load_rows(shared, x, norms, T, K, first_k);
    fence_async_proxy();
    __syncthreads();

    float sums[MAX_T / 2];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        barrier_wait(shared.full + 8 * step, 0);
        products_begin();
        const u64 a = operand(shared.weights + step * WEIGHT_BYTES),
                  b = operand(shared.rows + step * ROW_BYTES);
#pragma unroll
        for (int i = 0; i < K_BLOCK / 16; ++i)
            product<MAX_T>(sums, a + i * OPERAND_STEP, b + i * OPERAND_STEP, step > 0 || i > 0);
        products_commit();
    }
    products_wait<0>();
    __syncthreads();
    store_sums(shared, sums);
    sync_cluster();

    constexpr int FOURS = COLUMNS / 4;
    for (int i = threadIdx.x; i < T * FOURS; i += 128) {
        const int t = i / FOURS, column = rank * COLUMNS + i % FOURS * 4;
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float squares = 0.0f;
#pragma unroll
        for (int r = 0; r < SPLITS; ++r) {
            const float4 part = load_float4_of(shared.sums(t, column), r);
            total = make_float4(total.x + part.x, total.y + part.y, total.z + part.z, total.w + part.w);
            if (NORM) squares += load_float_of(shared.squares + t * 4, r);
        }
        const float scale = NORM ? rsqrtf(squares / K + eps) : 1.0f;
        const u64 at = static_cast<u64>(t) * N + tile + column;
        float old[4] = {};
#if ADD
        const uint2 words = *reinterpret_cast<const uint2*>(residual + at);
        old[0] = first_of(words.x), old[1] = second_of(words.x);
        old[2] = first_of(words.y), old[3] = second_of(words.y);
#endif
        *reinterpret_cast<uint2*>(out + at) =
            make_uint2(pack(old[0] + scale * total.x, old[1] + scale * total.y),
                       pack(old[2] + scale * total.z, old[3] + scale * total.w));
    }
    sync_cluster();  // other blocks of the cluster may still read this shared memory
}
