// SPDX-License-Identifier: Apache-2.0
// RMSNorm, router and choice of experts in one launch: of each token the K largest of E logits
// x / sqrt(mean(x^2) + eps) * norm . weight[e], their softmax weights, and the normalised token.
//
// | argument | shape  | dtype      |                                                                        |
// |----------|--------|------------|------------------------------------------------------------------------|
// | x        | [T, H] | bf16, fp16 | row-major, 16 bytes                                                    |
// | norm     | [H]    | as x       | of RMSNorm; 16 bytes; NORM 0: not read                                 |
// | weight   | [E, H] | as x       | row-major, 16 bytes                                                    |
// | normed   | [T, H] | as x       | out; row-major, 16 bytes; rounded once; NORM 0: not written            |
// | ids      | [T, K] | int32      | out; descending logit, of equal ones the lowest expert first; NaN counts as largest |
// | weights  | [T, K] | fp32       | out; softmax over all E; RENORMALISE: divided by their sum             |
//
// NORM 0: x is normalised already; logits are x . weight[e].
// H = 512 * SLICES, E = 128 * TILES. x * norm is rounded to the dtype of x; all else is fp32. NaN logits give
// NaN weights, and ids in 0 .. E - 1.
//
// A cluster of eight blocks takes GROUPS groups of eight tokens. A block makes the logits of 16 * TILES
// experts: its 16 warps share H, and hold their part of the weight in registers from before the wait for x.
// Block r of the cluster then has all logits of token r of each group in its shared memory: blocks send them,
// and a barrier counts their bytes. One warp a token chooses. Threads: 512. Blocks: 8 * ceil(T / (8 GROUPS)).
// Consumers: the kernels of the experts.
#ifndef SLICES
#define SLICES 4
#endif
#ifndef TILES
#define TILES 1
#endif
#ifndef TOP_K
#define TOP_K 8
#endif
#ifndef GROUPS
#define GROUPS 1
#endif
#ifndef RENORMALISE
#define RENORMALISE 1
#endif
#ifndef NORM
#define NORM 1
#endif
#define CLUSTER 8

#include "common/cluster.cuh"
#include "common/rows.cuh"
#include "sm80/mma.cuh"
#include "sm90/ptx.cuh"

constexpr int H = 512 * SLICES, E = 128 * TILES, OWN = E / CLUSTER, WARPS = 16;
constexpr int TOKENS = 8 * GROUPS;
constexpr int WIDTH = H / WARPS;  // channels of a warp, in chunks of 32
constexpr int A_LANE = E / 32;    // logits that a lane chooses among

struct Shared {
    u64 full;                             // counts the bytes of logits
    float logits[GROUPS][E];              // of this block's tokens
    float sums[WARPS][OWN * TOKENS + 8];  // threads that add parts of a logit use other banks
    float squares[WARPS][TOKENS];
};

// x * scale * gain of eight channels.
__device__ __forceinline__ uint4 normalised(uint4 x, uint4 gain, float scale) {
    const u32 left[4] = {x.x, x.y, x.z, x.w}, right[4] = {gain.x, gain.y, gain.z, gain.w};
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        out[i] = pack(first_of(left[i]) * scale * first_of(right[i]),
                      second_of(left[i]) * scale * second_of(right[i]));
    return make_uint4(out[0], out[1], out[2], out[3]);
}

// The largest that a lane has, the lowest of equal ones: the bits grow with the logit.
struct Candidate {
    int bits, at;
};

__device__ __forceinline__ Candidate best_of(const int (&bits)[A_LANE]) {
    Candidate best{bits[0], 0};
#pragma unroll
    for (int i = 1; i < A_LANE; ++i)
        if (bits[i] > best.bits) best = {bits[i], i};
    return best;
}

__device__ __forceinline__ float value_of(int bits) {
    return __int_as_float(bits < 0 ? bits ^ 0x7fffffff : bits);
}

// By one warp: lane l has logits A_LANE * l .. of a token.
__device__ __forceinline__ void choose(const float* logits, int* ids, float* weights) {
    constexpr float LOG2E = 1.4426950408889634f;
    constexpr int TAKEN = -0x7fffffff - 1;
    const int lane = threadIdx.x % 32;
    int bits[A_LANE];
#pragma unroll
    for (int i = 0; i < A_LANE; ++i) {
        const float z = logits[A_LANE * lane + i];
        const int of = __float_as_int(z + 0.0f);  // -0 is 0
        bits[i] = z != z ? 0x7fffffff : of < 0 ? of ^ 0x7fffffff : of;
    }
    float highest = 0.0f, mine = 0.0f;
#if !RENORMALISE
    float total = 0.0f;
#endif
#pragma unroll
    for (int k = 0; k < TOP_K; ++k) {
        const Candidate best = best_of(bits);
        const int most = __reduce_max_sync(~0u, best.bits);
        const bool own = lane == __ffs(__ballot_sync(~0u, best.bits == most)) - 1;
        if (k == 0) {
            highest = value_of(most);
#if !RENORMALISE
#pragma unroll
            for (int i = 0; i < A_LANE; ++i) total += exp2_of((value_of(bits[i]) - highest) * LOG2E);
#endif
        }
        if (own) ids[k] = A_LANE * lane + best.at;
        if (lane == k) mine = exp2_of((value_of(most) - highest) * LOG2E);
#pragma unroll
        for (int i = 0; i < A_LANE; ++i)
            if (own && best.at == i) bits[i] = TAKEN;
    }
#if RENORMALISE
    const float total = warp_sum(mine);
#else
    total = warp_sum(total);
#endif
    if (lane < TOP_K) weights[lane] = mine / total;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    norm_route(const u16* x, const u16* norm, const u16* weight, u16* normed, int* ids, float* weights,
               float eps, int T) {
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_memory());
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int rank = rank_in_cluster(), first_channel = warp * WIDTH + c * 8;
    constexpr int CHUNKS = WIDTH / 32;  // a lane has 8 channels of each 32

    // Of 32 channels, lane c of four has 8 that follow one another: two steps of a product take them as their
    // k 2 c, 2 c + 1, 2 c + 8, 2 c + 9. x goes by the same order.
    uint4 rows[TILES][2][CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u64 row = rank * OWN + tile * 16 + half * 8 + g;
                rows[tile][half][i] =
                    *reinterpret_cast<const uint4*>(weight + row * H + first_channel + 32 * i);
            }
    }
    const uint4* gains = reinterpret_cast<const uint4*>(norm + first_channel);
    const u32 full = shared_address(&shared.full);
    // token 8 i + r of the cluster is block r's
    const int first = blockIdx.x / CLUSTER * TOKENS, t = first + g;
    const int own = first + rank, tokens = own < T ? min((T - own + 7) / 8, GROUPS) : 0;
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        barrier_init_fence();
        if (tokens) barrier_arrive_expect(full, tokens * E * 4);
    }
    sync_cluster();  // before others send
    let_successor_start();
    wait_for_predecessor();

    uint4 words[GROUPS][CHUNKS], gain[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) gain[i] = NORM ? gains[4 * i] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const int token = t + 8 * group;
        const uint4* from = reinterpret_cast<const uint4*>(x + static_cast<u64>(token) * H + first_channel);
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) words[group][i] = token < T ? from[4 * i] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        float sums[TILES][4] = {}, squares = 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            if (NORM) squares = dot(words[group][i], words[group][i], squares);
            const uint4 scaled = NORM ? times(words[group][i], gain[i]) : words[group][i];
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const uint4 low = rows[tile][0][i], high = rows[tile][1][i];
                const u32 even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
                multiply_add(sums[tile], even, scaled.x, scaled.y);
                multiply_add(sums[tile], odd, scaled.z, scaled.w);
            }
        }
        if (NORM) {
            squares += __shfl_xor_sync(~0u, squares, 1);
            squares += __shfl_xor_sync(~0u, squares, 2);
        }
        if (NORM && c == 0) shared.squares[warp][8 * group + g] = squares;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                *reinterpret_cast<float2*>(
                    &shared.sums[warp][(tile * 16 + i * 8 + g) * TOKENS + 8 * group + 2 * c]) =
                    make_float2(sums[tile][2 * i], sums[tile][2 * i + 1]);
    }
    __syncthreads();

    // four lanes, which hold channels of token g of a group, add the parts of a logit of it
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const int token = 8 * group + g;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; NORM && w < WARPS; ++w) total += shared.squares[w][token];
        const float scale = NORM ? rsqrtf(total / H + eps) : 1.0f;
#pragma unroll
        for (int e = warp; e < OWN; e += WARPS) {
            float logit = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS / 4; ++w) logit += shared.sums[4 * w + c][e * TOKENS + token];
            logit += __shfl_xor_sync(~0u, logit, 1);
            logit += __shfl_xor_sync(~0u, logit, 2);
            if (c == 0 && first + token < T)
                send_one(shared_address(&shared.logits[group][rank * OWN + e]), g, full, logit * scale);
        }
        if (NORM && g == rank && first + token < T) {
            uint4* to =
                reinterpret_cast<uint4*>(normed + static_cast<u64>(first + token) * H + first_channel);
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i) to[4 * i] = normalised(words[group][i], gain[i], scale);
        }
    }
    if (warp < tokens) {  // to a block without a token nobody sends
        barrier_wait(full, 0);
        const u64 at = own + 8 * warp;
        choose(shared.logits[warp], ids + at * TOP_K, weights + at * TOP_K);
    }
}
