// SPDX-License-Identifier: Apache-2.0
// Attention of a piece of a prompt: causal among the piece's tokens, and to all packed tokens of its row, in
// one launch; heads of 128 channels. No key or value of the past is unpacked to memory.
//
// | argument   | shape                         | dtype |                                                      |
// |------------|-------------------------------|-------|------------------------------------------------------|
// | q          | [n, KV * GROUP, 128]          | bf16  | row-major, 16 bytes                                  |
// | q_scale    | [128]                         | fp32  | or null: q is multiplied by it, before a rotation    |
// | out        | as q                          | bf16  | out; one split                                       |
// | partial    | [n, KV * GROUP, splits, 128]  | fp32  | out; else: each part's result                        |
// | lse        | [n, KV * GROUP, splits]       | fp32  | out; else: log2 of each part's sum; -inf: no key     |
// | at         | [n]                           | int64 | which token of the piece each query is; ascending    |
// | own        | [pages, KV, 2, PAGE * 256]    | bytes | the piece's tokens in pages of a tier of 16 bits,    |
// | own_scales |                               |       | one after another                                    |
// | then, for 2, 3, 4, 8 and 16 bits; null where TIERS lacks the bit 1 << bits:                           |
// | payload, scales, table, counts |           |       | as bucketed_attention                                |
// | own_count, row |                           | int64 | tokens of the piece; row of the tables               |
//
// ROTATE: keys and values are rotated (kv/bucketed/quantise.py), q and the output are not.
// Grid: (ceil(n * GROUP / ROWS), KV, splits); threads: 32 * WARPS. Row r of a key/value head is query r /
// GROUP, head r % GROUP. Shared memory: q as fragments [ROWS / 16, 8, 32] of 16 bytes, STAGES units.
//
// A thread has at most 255 registers.
// Queries are the M side of products, tokens or channels the N side: a packed pair of keys or values is a
// word of the B operand as it is, for 16 bits and for fewer. All warps share a unit; 32 queries of a warp
// share what it unpacks. Scales and weights are bucketed_attention's. 16 bits come first, then a power of two
// is taken from the output, once.
#include "common/copies.cuh"
#include "sm80/bucketed_prompt.cuh"
#include "sm80/hadamard.cuh"

// What a row and a key/value head have of a tier; payload and scales begin at the head's part of page 0.
struct Tier {
    const unsigned char* payload;
    const uint4* scales;
    const int* table;
    int count, end;  // end: of its units among the row's
};

// Kinds in the order in which they are read: own, 16 bits, then fewer.
__device__ __forceinline__ int next_kind(int kind) { return kind == OWN ? 4 : kind - 1; }

struct Unit {
    const Tier* tiers;
    int at, end, begin = 0, kind = OWN;  // begin: of its tier

    __device__ __forceinline__ void find() {
        if (is())
            while (at >= tiers[kind].end) begin = tiers[kind].end, kind = next_kind(kind);
    }
    __device__ __forceinline__ bool is() const { return at < end; }

    __device__ __forceinline__ void copy(u32 stage, int kv_heads) const {
        const int bits = bits_of_kind(kind), slot = (at - begin) * 32;
        const Tier& tier = tiers[kind];
        const u64 page = static_cast<u64>(kind == OWN ? slot / PAGE : tier.table[slot / PAGE]);
        const u32 unit = slot % PAGE / 32, chunks = 32 * bits;
        const unsigned char* from =
            tier.payload + page * (kv_heads * 2 * (PAGE * 16)) * bits + unit * (512 * bits);
        for (u32 i = threadIdx.x; i < 2 * chunks; i += 32 * WARPS) {
            const u32 in = i < chunks ? i * 16 : PAGE * 16 * bits + (i - chunks) * 16;
            copy_16(stage + i * 16, from + in);
        }
        if (threadIdx.x < 8)
            copy_16(stage + SCALES_AT + threadIdx.x * 16,
                    tier.scales + page * (kv_heads * (PAGE / 4)) + unit * 8 + threadIdx.x);
    }
};

// q to fragments; the sums and powers of two that scores need.
__device__ __forceinline__ void prepare_queries(unsigned char* memory, float2 (&factors)[ROWS], const u16* q,
                                                const float4* q_scale, int first, int n, int kv_heads,
                                                int head, float scale) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 4
    for (int r = warp; r < ROWS; r += WARPS) {
        const int row = first + r;
        uint2 words = make_uint2(0, 0);
        if (row / GROUP < n) {
            const u64 of = static_cast<u64>(row / GROUP) * (kv_heads * GROUP) + head * GROUP + row % GROUP;
            words = reinterpret_cast<const uint2*>(q + of * 128)[lane];
        }
        float x[4] = {first_of(words.x), second_of(words.x), first_of(words.y), second_of(words.y)};
        if (q_scale) {
            const float4 scales = q_scale[lane];
            x[0] *= scales.x, x[1] *= scales.y, x[2] *= scales.z, x[3] *= scales.w;
        }
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
            const u32 exact = pack_fp16(x[2 * pair] * power(up), x[2 * pair + 1] * power(up));
            sum += first_of_fp16(exact) + second_of_fp16(exact);
            const int c = 4 * lane + 2 * pair, fragment = r / 16 * 8 + c / 16;
            const int of = r % 16 / 8 + c % 16 / 8 * 2;
            reinterpret_cast<u32*>(memory)[(fragment * 32 + r % 8 * 4 + c % 8 / 2) * 4 + of] = exact;
        }
#pragma unroll
        for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) factors[r] = make_float2(scale * power(24 - up), scale * power(-up) * sum);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    bucketed_prompt(const u16* q, const float4* q_scale, u16* out, float* partial, float* lse,
                    const long long* at, const unsigned char* own,
                    const uint4* own_scales,  //
                    const unsigned char* payload_2, const uint4* scales_2, const int* table_2,
                    const int* counts_2, const unsigned char* payload_3, const uint4* scales_3,
                    const int* table_3, const int* counts_3, const unsigned char* payload_4,
                    const uint4* scales_4, const int* table_4, const int* counts_4,
                    const unsigned char* payload_8, const uint4* scales_8, const int* table_8,
                    const int* counts_8, const unsigned char* payload_16, const uint4* scales_16,
                    const int* table_16, const int* counts_16, long long own_count, long long row, int n,
                    int wide_2, int wide_3, int wide_4, int wide_8, int wide_16, float scale) {
    __shared__ Tier tiers[KINDS];
    __shared__ float2 factors[ROWS];  // score = (sum * x - half * y) * scale_k

    unsigned char* memory = dynamic_memory();
    const int head = blockIdx.y, kv_heads = gridDim.y;
    const int first = (gridDim.x - 1 - blockIdx.x) * ROWS;  // the longest first
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    wait_for_predecessor();
    let_successor_start();
    if (threadIdx.x == 0) {
        const auto set = [&](int kind, const unsigned char* payload, const uint4* scales, const int* table,
                             const int* counts, int wide) {
            const int count = has(kind) ? max(0, min(counts[row], wide * PAGE)) : 0;
            tiers[kind] = Tier{payload + head * 2 * (PAGE * 16 * bits_of_kind(kind)),
                               scales + head * (PAGE / 4), table + static_cast<u64>(row) * wide, count, 0};
        };
        set(0, payload_2, scales_2, table_2, counts_2, wide_2);
        set(1, payload_3, scales_3, table_3, counts_3, wide_3);
        set(2, payload_4, scales_4, table_4, counts_4, wide_4);
        set(3, payload_8, scales_8, table_8, counts_8, wide_8);
        set(4, payload_16, scales_16, table_16, counts_16, wide_16);
        const int last = static_cast<int>(at[min(n - 1, (first + ROWS - 1) / GROUP)]);
        tiers[OWN] = Tier{own + head * 2 * (PAGE * 256), own_scales + head * (PAGE / 4), nullptr,
                          min(static_cast<int>(own_count), last + 1), 0};
        int end = 0;
        for (int kind = OWN; kind >= 0; kind = next_kind(kind))
            tiers[kind].end = end += (tiers[kind].count + 31) / 32;
    }
    prepare_queries(memory, factors, q, q_scale, first, n, kv_heads, head, scale);
    __syncthreads();

    State state{};
#pragma unroll
    for (int m = 0; m < MT; ++m) state.most[m][0] = state.most[m][1] = LOWEST;
    const auto* fragments = reinterpret_cast<const uint4*>(memory) + warp * (MT * 256) + lane;
    const float2* mine = factors + warp * (16 * MT);
    unsigned char* stages = memory + Q_BYTES;
    const u32 stages_at = shared_address(stages);
    const int split = blockIdx.z, splits = gridDim.z, all = tiers[0].end;
    Unit now{tiers, all * split / splits, all * (split + 1) / splits};
    now.find();
    Unit ahead = now;
    int to = 0, slot = 0;
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (ahead.is()) ahead.copy(stages_at + to * STAGE, kv_heads), ++ahead.at, ahead.find();
        copies_commit();
        ++to;
    }
    bool packed = false;
    while (now.is()) {
        copies_wait<STAGES - 2>();
        __syncthreads();  // the unit is there; all have read the one before
        if (ahead.is()) ahead.copy(stages_at + to * STAGE, kv_heads), ++ahead.at, ahead.find();
        copies_commit();
        to = to + 1 == STAGES ? 0 : to + 1;
        const unsigned char* stage = stages + slot * STAGE;
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        const int kind = now.kind, done = (now.at - now.begin) * 32, left = tiers[kind].count - done;
        if (kind < 4 && !packed) rescale(state, power(-24)), packed = true;
        int sees[MT][2] = {};
        if (kind == OWN) {
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int query = (first + warp * (16 * MT) + 16 * m + 8 * h + lane / 4) / GROUP;
                    sees[m][h] = query < n ? static_cast<int>(at[query]) - done : -1;
                }
            attend<16, true>(state, stage, fragments, mine, left, sees);
        }
        if (has(4) && kind == 4) attend<16, false>(state, stage, fragments, mine, left, sees);
        if (has(3) && kind == 3) attend<8, false>(state, stage, fragments, mine, left, sees);
        if (has(2) && kind == 2) attend<4, false>(state, stage, fragments, mine, left, sees);
        if (has(1) && kind == 1) attend<3, false>(state, stage, fragments, mine, left, sees);
        if (has(0) && kind == 0) attend<2, false>(state, stage, fragments, mine, left, sees);
        ++now.at;
        now.find();
    }
    copies_wait<0>();
    const float up = packed ? power(24) : 1.0f;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float total = state.total[m][h], offset = state.offset[m][h];
#pragma unroll
            for (int step = 1; step < 4; step *= 2) {
                total += __shfl_xor_sync(~0u, total, step);
                offset += __shfl_xor_sync(~0u, offset, step);
            }
            const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
            state.total[m][h] = total;
#pragma unroll
            for (int c = 0; c < 16; ++c)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    state.o[m][c][2 * h + e] = (state.o[m][c][2 * h + e] * up - offset) * inverse;
        }
        if (ROTATE && splits == 1) rotate_rows(state.o[m]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row_of = first + warp * (16 * MT) + 16 * m + 8 * h + lane / 4;
            if (row_of / GROUP >= n) continue;
            const u64 of =
                static_cast<u64>(row_of / GROUP) * (kv_heads * GROUP) + head * GROUP + row_of % GROUP;
            if (splits == 1) {
                u32* words = reinterpret_cast<u32*>(out + of * 128) + lane % 4;
#pragma unroll
                for (int c = 0; c < 16; ++c)
                    words[4 * c] = pack(state.o[m][c][2 * h], state.o[m][c][2 * h + 1]);
            } else {
                auto* pairs = reinterpret_cast<float2*>(partial + (of * splits + split) * 128) + lane % 4;
#pragma unroll
                for (int c = 0; c < 16; ++c)
                    pairs[4 * c] = make_float2(state.o[m][c][2 * h], state.o[m][c][2 * h + 1]);
                const float total = state.total[m][h];
                if (lane % 4 == 0)
                    lse[of * splits + split] = total == 0.0f
                                                   ? __int_as_float(0xff800000)
                                                   : state.most[m][h] - HEADROOM + logarithm_to_two(total);
            }
        }
    }
}
