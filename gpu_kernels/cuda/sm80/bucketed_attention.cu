// SPDX-License-Identifier: Apache-2.0
// Attention of a few queries a row to keys and values in tiers of 2, 3, 4, 8 and 16 bits, all in one launch;
// heads of 128 channels.
//
// | argument   | shape                         | dtype |                                                     |
// |------------|-------------------------------|-------|-----------------------------------------------------|
// | q          | [T, N, KV * GROUP, 128]       | bf16  | row-major, 16 bytes                                 |
// | q_scale    | [128]                         | fp32  | or null: q is multiplied by it, before a rotation   |
// | out        | as q                          | bf16  | out; SPLITS == 1 and no MASS                        |
// | partial    | [T, N, KV * GROUP, SPLITS, 128] | fp32 | out; else: each part's result                      |
// | lse        | [T, N, KV * GROUP, SPLITS]    | fp32  | out; else: log2 of each part's sum; -inf: no key    |
// | mass       | [T, KV, most_pieces, TILES * 8 * QT] | fp32 | out; MASS: log2 of the sum of the weights of a     |
// |            |                               |       | piece, relative to 1, for each query                |
// | rows       | [T]                           | int64 | row of the tables for each entry                    |
// | positions  | [T]                           | int64 | CAUSAL: position of the first of the N queries      |
// | num_tokens | []                            | int32 | or null: entries from it on see no key              |
// | then, for 2, 3, 4, 8 and 16 bits; null where TIERS lacks the bit 1 << bits:                             |
// | payload    | [pages, KV, 2, PAGE * 16 * bits] | bytes | keys, values; see kv/bucketed/packing.py         |
// | scales     | [pages, KV, PAGE / 32, 8, 4, 2]  | fp16  | (key, value) of token 8 i + j of a unit at j, i; |
// |            |                               |       | a negative key scale: no token                      |
// | ids        | [pages, PAGE]                 | int32 | CAUSAL: positions of tokens                         |
// | table      | [rows, wide]                  | int32 | pages of each row                                   |
// | counts     | [rows]                        | int32 | slots in use                                        |
//
// CAUSAL: a query sees the tokens of tiers of 8 and 16 bits up to its own position, and all others.
// ROTATE: q and the output are multiplied by the Hadamard matrix (kv/bucketed/quantise.py).
// Grid: (SPLITS, KV, T * TILES); threads: 32 * WARPS. A block has 8 * QT of the N * GROUP queries of a
// key/value head, and a share of the row's pieces. A piece is 32 tokens of 2, 3 and 4 bits, 16 of 8, 8 of 16.
// Each warp takes a run of pieces and keeps its own softmax. Warps merge in shared memory, blocks in
// merge_splits.
//
// The kernel reads rows, num_tokens, tables and counts before it waits for its predecessor: a kernel launched
// without PDL must run between their writers and this one. A thread has at most 255 registers.
// Products: scores^T = keys * q^T and out^T += values^T * weights^T, so that 16 tokens or channels are the M
// side, 8 queries the N side: one key/value head serves 8 query heads without padding. A lane copies its own
// fragments (cp.async) and reads them back, so no barrier is needed; a pair of levels takes one AND. Powers
// of two by channel are folded into q, and into the output when a warp leaves a tier. scale_k multiplies the
// score. scale_v is folded into the exponent of the weight, so that fp16 weights use fp16's range whatever
// the scales.
//
// Shared memory: q for each tier, [5, QT, 4, 32] of 16 bytes; two pieces a warp. At the end, in the
// same place, the warps' results [WARPS, 8 * QT, ROW + 2] fp32.
#include "sm80/bucketed_attend.cuh"
#include "sm80/bucketed_pieces.cuh"
#include "sm80/hadamard.cuh"

// The first copies start before queries are prepared. Blocks of 16 warps take 1 microsecond longer that way.
constexpr bool EARLY = WARPS <= 8;
constexpr int OWN_ROWS = (ROWS + WARPS - 1) / WARPS;  // that a warp prepares, at most

// The lane's channels of the warp's queries, and what multiplies them.
struct Own {
    uint2 words[OWN_ROWS];
    float4 scales;

    Own() = default;
    __device__ __forceinline__ Own(const u16* q, const float4* q_scale, int first, int kv_heads, int head,
                                   int t) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) {
            const int r = threadIdx.x / 32 + i * WARPS, query = first + r;
            words[i] = make_uint2(0, 0);
            if (r < ROWS && query < QUERIES * GROUP) {
                const u64 of = (static_cast<u64>(t) * QUERIES + query / GROUP) * (kv_heads * GROUP) +
                               head * GROUP + query % GROUP;
                words[i] = reinterpret_cast<const uint2*>(q + of * D)[lane];
            }
        }
        scales = q_scale ? q_scale[lane] : make_float4(1, 1, 1, 1);
    }
};

// q to fragments, scaled for each tier; the sums and powers of two that scores need.
__device__ __forceinline__ void prepare_queries(unsigned char* memory, float2 (&factors)[ROWS],
                                                const Own& own, float scale) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i) {
        const int r = threadIdx.x / 32 + i * WARPS;
        if (r >= ROWS) break;
        const uint2 words = own.words[i];
        float x[4] = {first_of(words.x), second_of(words.x), first_of(words.y), second_of(words.y)};
        x[0] *= own.scales.x, x[1] *= own.scales.y, x[2] *= own.scales.z, x[3] *= own.scales.w;
        if (ROTATE) hadamard(x);
        u32 most = 0;  // of the absolute values, as words
#pragma unroll
        for (int i = 0; i < 4; ++i) most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
#pragma unroll
        for (int step = 16; step; step /= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
        // the largest becomes 2^13 to 2^14
        const int up = max(-100, min(100, 13 + 127 - static_cast<int>(most >> 23)));
        float sum = 0;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const float a = x[2 * pair] * power(up), b = x[2 * pair + 1] * power(up);
            const u32 exact = pack_fp16(a, b);
            const float one = first_of_fp16(exact), two = second_of_fp16(exact);
            sum += one + two;
            const int c = lane / 2;
            u32* to = reinterpret_cast<u32*>(memory) +
                      ((r / 8 * 4 + c / 4) * 32 + r % 8 * 4 + lane % 2 * 2 + pair) * 4 + c % 4;
#pragma unroll
            for (int kind = 0; kind < KINDS; ++kind) {
                if (!has(kind)) continue;
                const int shift = kind == 0   ? shift_of<2>(c)
                                  : kind == 1 ? shift_of<3>(c)
                                  : kind == 2 ? shift_of<4>(c)
                                              : 0;
                to[kind * QT * 512] =
                    kind == 4 ? pack(a, b) : pack_fp16(one * power(-shift), two * power(-shift));
            }
        }
#pragma unroll
        for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) {
            factors[r] = make_float2(scale * power(24 - up), scale * power(-up) * sum);
        }
    }
}

// A warp's way through its pieces.
struct Walk {
    State& state;
    const Queries& queries;
    const float2* factors;
    const unsigned char* memory;
    Place ahead;  // the next to copy
    int kv_heads, slot = 0;
    float* mass = nullptr;  // of the next piece

    __device__ __forceinline__ unsigned char* slots() const {
        return dynamic_memory() + Q_BYTES + threadIdx.x / 32 * (2 * SLOT);
    }

    // Copy the piece at `ahead`, of KIND, to a slot.
    __device__ __forceinline__ void fill(int to, int KIND) {
        if (ahead.is()) {
            ahead.copy(KIND, shared_address(slots()) + to + threadIdx.x % 32 * 16, kv_heads);
            ahead.go_on(KIND);
        }
        copies_commit();
    }

    // The pieces of a tier; now: where the warp is.
    template <int KIND>
    __device__ __forceinline__ void tier(Place& now) {
        constexpr int BITS = bits_of_kind(KIND), TOKENS = tokens_of_piece(KIND);
        if (!has(KIND) || now.kind != KIND || !now.is()) return;
        const Tier& tier = now.tiers[KIND];
        const uint4* q = reinterpret_cast<const uint4*>(memory) + KIND * QT * 128;
        const int count = tier.count;
        rescale<BITS, true>(state);
        while (true) {
            copies_wait<1>();
            const int left = count - now.at * TOKENS;
            const int* ids = nullptr;
            if (CAUSAL && KIND >= 3)
                ids = tier.ids + static_cast<u64>(now.page) * PAGE + now.at * TOKENS % PAGE;
            if constexpr (KIND < 4)
                attend<BITS>(state, slots() + slot, factors, q, now.at & 1, left, ids, queries, mass);
            else
                attend_bf16(state, slots() + slot, factors, q, now.at & 3, left, ids, queries, mass);
            if (MASS) mass += TILES * ROWS;
            __syncwarp();  // the slot was read
            if (ahead.kind == KIND)
                fill(slot, KIND);
            else
                fill(slot, ahead.kind);
            slot = SLOT - slot;
            if (now.at + 1 == now.stop) break;
            if (CAUSAL)
                now.go_on(KIND);
            else
                ++now.at;
        }
        now.go_on(KIND);
        rescale<BITS, false>(state);
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, REGISTER_WARPS < WARPS ? 1 : REGISTER_WARPS / WARPS)
    bucketed_attention(
        const u16* q, const float4* q_scale, u16* out, float* partial, float* lse, float* mass,
        const long long* rows, const long long* positions, const int* num_tokens,  //
        const unsigned char* payload_2, const uint4* scales_2, const int* ids_2, const int* table_2,
        const int* counts_2,  //
        const unsigned char* payload_3, const uint4* scales_3, const int* ids_3, const int* table_3,
        const int* counts_3,  //
        const unsigned char* payload_4, const uint4* scales_4, const int* ids_4, const int* table_4,
        const int* counts_4,  //
        const unsigned char* payload_8, const uint4* scales_8, const int* ids_8, const int* table_8,
        const int* counts_8,  //
        const unsigned char* payload_16, const uint4* scales_16, const int* ids_16, const int* table_16,
        const int* counts_16,  //
        int wide_2, int wide_3, int wide_4, int wide_8, int wide_16, int most_pieces, float scale) {
    __shared__ Tier tiers[KINDS];
    __shared__ float2 factors[ROWS];  // score = (sum * x - half * y) * scale_k

    unsigned char* memory = dynamic_memory();
    const int split = blockIdx.x, splits = gridDim.x, head = blockIdx.y, kv_heads = gridDim.y;
    const int t = blockIdx.z / TILES, first = blockIdx.z % TILES * ROWS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    let_successor_start();
    if (threadIdx.x == 0) {
        const long long row = rows[t];
        const bool valid = !num_tokens || t < *num_tokens;
        const auto set = [&](int kind, const unsigned char* payload, const uint4* scales, const int* ids,
                             const int* table, const int* counts, int wide) {
            const int count = has(kind) && valid ? max(0, min(counts[row], wide * PAGE)) : 0;
            const u64 apart = PAGE * 16 * bits_of_kind(kind);
            tiers[kind] = Tier{payload + head * 2 * apart,
                               scales + head * (PAGE / 4),
                               ids,
                               table + row * wide,
                               count,
                               (count + tokens_of_piece(kind) - 1) / tokens_of_piece(kind)};
        };
        set(0, payload_2, scales_2, ids_2, table_2, counts_2, wide_2);
        set(1, payload_3, scales_3, ids_3, table_3, counts_3, wide_3);
        set(2, payload_4, scales_4, ids_4, table_4, counts_4, wide_4);
        set(3, payload_8, scales_8, ids_8, table_8, counts_8, wide_8);
        set(4, payload_16, scales_16, ids_16, table_16, counts_16, wide_16);
    }
    if (!EARLY) {
        wait_for_predecessor();
        prepare_queries(memory, factors, Own(q, q_scale, first, kv_heads, head, t), scale);
    }
    __syncthreads();

    u32 all = 0;
#pragma unroll
    for (int kind = 0; kind < KINDS; ++kind) all += tiers[kind].pieces;
    // all * me / of, in 32 bits
    const u32 me = split * WARPS + warp, of = splits * WARPS, each = all / of, more = all % of;
    const int from = each * me + more * me / of, pieces = each + more * (me + 1) / of - more * me / of;
    State state{};
    Queries queries;
    Place now(tiers, from, pieces);
    Walk walk{state, queries, factors, memory, now, kv_heads};
    if (now.is()) walk.ahead.go_on(now.kind);
    if (EARLY) wait_for_predecessor();
    // queries before keys: behind keys they would wait for all of the first copies
    Own own;
    if (EARLY) own = Own(q, q_scale, first, kv_heads, head, t);
    const int position = CAUSAL ? static_cast<int>(positions[t]) : 0;
    if (now.is()) now.copy(now.kind, shared_address(walk.slots()) + lane * 16, kv_heads);
    copies_commit();
    walk.fill(SLOT, walk.ahead.kind);
    if (EARLY) prepare_queries(memory, factors, own, scale);
#pragma unroll
    for (int n = 0; n < QT; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = 8 * n + lane % 4 * 2 + i;
            state.most[n][i] = LOWEST;
            queries.sees[n][i] = position + (first + r) / GROUP;
        }
    if (MASS)
        walk.mass =
            mass + ((static_cast<u64>(t) * kv_heads + head) * most_pieces + from) * (TILES * ROWS) + first;
    if (EARLY) __syncthreads();
    walk.tier<0>(now), walk.tier<1>(now), walk.tier<2>(now), walk.tier<3>(now), walk.tier<4>(now);
    copies_wait<0>();
    __syncthreads();

    // merge the warps
    float* results = reinterpret_cast<float*>(memory);
    auto* merge_most = reinterpret_cast<float (*)[ROWS]>(results + WARPS * ROWS * ROW);
    auto* merge_total = merge_most + WARPS;
#pragma unroll
    for (int n = 0; n < QT; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = 8 * n + lane % 4 * 2 + i;
            float total = state.total[n][i], offset = state.offsets[n][i];
#pragma unroll
            for (int step = 4; step < 32; step *= 2) {
                total += __shfl_xor_sync(~0u, total, step);
                offset += __shfl_xor_sync(~0u, offset, step);
            }
            if (lane < 4) {
                merge_most[warp][r] = state.most[n][i];
                merge_total[warp][r] = total;
            }
#pragma unroll
            for (int t = 0; t < 8; ++t) {
                float* to = results + (warp * ROWS + r) * ROW + 16 * t + lane / 4;
                to[0] = state.o[n][t][i] - offset;
                to[8] = state.o[n][t][i + 2] - offset;
            }
        }
    __syncthreads();
    for (int r = warp; r < ROWS; r += WARPS) {
        const int query = first + r;
        if (query >= QUERIES * GROUP) continue;
        float most = LOWEST, total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) most = fmaxf(most, merge_most[w][r]);
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = power_of_two(merge_most[w][r] - most);
            const float4 x = *reinterpret_cast<const float4*>(results + (w * ROWS + r) * ROW + lane * 4);
            total = fmaf(merge_total[w][r], weight, total);
            sum.x = fmaf(x.x, weight, sum.x), sum.y = fmaf(x.y, weight, sum.y);
            sum.z = fmaf(x.z, weight, sum.z), sum.w = fmaf(x.w, weight, sum.w);
        }
        const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
        const u64 of = (static_cast<u64>(t) * QUERIES + query / GROUP) * (kv_heads * GROUP) + head * GROUP +
                       query % GROUP;
        sum.x *= inverse, sum.y *= inverse, sum.z *= inverse, sum.w *= inverse;
        if (splits == 1 && !MASS) {
            if (ROTATE) hadamard(sum);
            reinterpret_cast<uint2*>(out + of * D)[lane] = make_uint2(pack(sum.x, sum.y), pack(sum.z, sum.w));
        } else {
            reinterpret_cast<float4*>(partial + (of * splits + split) * D)[lane] = sum;
            if (lane == 0)
                lse[of * splits + split] =
                    total == 0.0f ? __int_as_float(0xff800000) : most - HEADROOM + logarithm_to_two(total);
        }
    }
}
