// A linear layer of a row or two behind a sum of ranks: sum[t] = x[t] + part[t] of every rank, as add_parts, and
// out[t] = rms_norm(sum[t]) * norm weight^T. Every block sums all of it, so that no launch lies between.
//
// | argument | shape     | dtype      |                                                                      |
// |----------|-----------|------------|----------------------------------------------------------------------|
// | part     | [ROWS, H] | bf16, fp16 | of this rank; row-major, 8 bytes                                      |
// | x        | [ROWS, H] | as part    | the same on every rank; row-major, 8 bytes                            |
// | sum      | [ROWS, H] | as part    | out; row-major, 8 bytes; not x: other blocks may still read it        |
// | norm     | [H]       | as part    | of RMSNorm; 8 bytes                                                   |
// | weight   | [N, H]    | as part    | of this rank; row-major, 16 bytes                                     |
// | out      | [ROWS, N] | as part    | out; row-major                                                        |
// | normed   | [ROWS, H] | as part    | out, or null: the normalised sum, rounded once; 8 bytes               |
// | heap     |           |            | of this rank: see parallel/heap.cuh                                   |
// | eps      |           | fp32       |                                                                       |
// | N, rank, capacity |  | int32      | capacity: of the heap, in 16 bytes; at least ROWS H / 4               |
//
// SIZE: H, a multiple of 256 up to 4096. Blocks: ceil(N / WARPS / CHANNELS), all resident; threads: 32 * WARPS. A warp
// makes CHANNELS outputs, whose weights it loads before it waits. A block sends every gridDim.x-th chunk of four
// elements, and writes these of sum and normed. The norm is of the rounded sum; its product is not rounded.
#include "common/rows.cuh"
#include "parallel/heap.cuh"

#ifndef SIZE
#define SIZE 2048
#endif
#ifndef ROWS
#define ROWS 1
#endif
#ifndef WARPS
#define WARPS 8
#endif
#ifndef CHANNELS
#define CHANNELS 2
#endif

constexpr int THREADS = 32 * WARPS, CHUNKS = SIZE / 4, EACH = (CHUNKS + THREADS - 1) / THREADS, STEPS = SIZE / 256;
static_assert(SIZE % 256 == 0 && SIZE <= 4096, "a lane keeps a sixteenth of H of each weight row");

__device__ __forceinline__ float4 values(uint2 data) {
    return make_float4(first_of(data.x), second_of(data.x), first_of(data.y), second_of(data.y));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    add_norm_linear(const u16* part, const u16* x, u16* sum, const u16* norm, const u16* weight, u16* out,
                    u16* normed, Heap* heap, float eps, int N, int rank, int capacity) {
    __shared__ float4 scaled[ROWS][CHUNKS];
    __shared__ float squares[ROWS][WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x, blocks = gridDim.x;
    const int first = (block * WARPS + warp) * CHANNELS;
    Ranks ranks(heap, rank, capacity);
    uint4 weights[CHANNELS][STEPS];
#pragma unroll
    for (int n = 0; n < CHANNELS; ++n) {
        const uint4* row = reinterpret_cast<const uint4*>(weight) + static_cast<u64>(min(first + n, N - 1)) * STEPS * 32;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) weights[n][i] = load_once(row + lane + 32 * i);
    }
    float4 gains[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int c = threadIdx.x + i * THREADS;
        if (c < CHUNKS) gains[i] = values(reinterpret_cast<const uint2*>(norm)[c]);
    }
    wait_for_predecessor();
    let_successor_start();
    ranks.begin();
    uint2 own[ROWS][EACH], old[ROWS][EACH];
#pragma unroll
    for (int t = 0; t < ROWS; ++t)
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int c = threadIdx.x + i * THREADS;
            if (c >= CHUNKS) break;
            own[t][i] = reinterpret_cast<const uint2*>(part)[t * CHUNKS + c];
            old[t][i] = reinterpret_cast<const uint2*>(x)[t * CHUNKS + c];
        }
#pragma unroll
    for (int t = 0; t < ROWS; ++t)
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int c = threadIdx.x + i * THREADS;
            if (c < CHUNKS && c % blocks == block) ranks.put(t * CHUNKS + c, own[t][i]);
        }
#pragma unroll
    for (int t = 0; t < ROWS; ++t) {
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int c = threadIdx.x + i * THREADS;
            if (c >= CHUNKS) break;
            float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            bool whole = true;
#pragma unroll
            for (int r = 0; r <= RANKS; ++r) {
                uint2 data = r < RANKS ? own[t][i] : old[t][i];
                if (r < RANKS && r != rank) whole &= ranks.take(r, t * CHUNKS + c, data);
                const float4 v = values(data);
                total = make_float4(total.x + v.x, total.y + v.y, total.z + v.z, total.w + v.w);
            }
            const uint2 rounded = make_uint2(pack(total.x, total.y), pack(total.z, total.w));
            if (whole && c % blocks == block) reinterpret_cast<uint2*>(sum)[t * CHUNKS + c] = rounded;
            const float4 v = values(rounded);
            square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            scaled[t][c] = make_float4(v.x * gains[i].x, v.y * gains[i].y, v.z * gains[i].z, v.w * gains[i].w);
        }
        square = warp_sum(square);
        if (lane == 0) squares[t][warp] = square;
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < ROWS; ++t) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total += squares[t][w];
        const float scale = rsqrtf(total / SIZE + eps);
        float products[CHANNELS] = {};
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const float4 a = scaled[t][2 * (lane + 32 * i)], b = scaled[t][2 * (lane + 32 * i) + 1];
#pragma unroll
            for (int n = 0; n < CHANNELS; ++n) {
                const uint4 w = weights[n][i];
                float& product = products[n];
                product = fmaf(first_of(w.x), a.x, product), product = fmaf(second_of(w.x), a.y, product);
                product = fmaf(first_of(w.y), a.z, product), product = fmaf(second_of(w.y), a.w, product);
                product = fmaf(first_of(w.z), b.x, product), product = fmaf(second_of(w.z), b.y, product);
                product = fmaf(first_of(w.w), b.z, product), product = fmaf(second_of(w.w), b.w, product);
            }
        }
#pragma unroll
        for (int n = 0; n < CHANNELS; ++n) {
            const float product = scale * warp_sum(products[n]);
            if (lane == 0 && first + n < N) out[static_cast<u64>(t) * N + first + n] = pack(product, 0.0f);
        }
        if (normed) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int c = threadIdx.x + i * THREADS;
                if (c >= CHUNKS || c % blocks != block) continue;
                const float4 v = scaled[t][c];
                reinterpret_cast<uint2*>(normed)[t * CHUNKS + c] =
                    make_uint2(pack(v.x * scale, v.y * scale), pack(v.z * scale, v.w * scale));
            }
        }
    }
    ranks.end();
}
