// SPDX-License-Identifier: Apache-2.0
// A row's packed keys and values to bf16, each at its token's position; behind them those of a piece of its
// prompt. Keys and values are rotated back, keys multiplied by their channels' scales. Heads of 128 channels.
//
// | argument     | shape              | dtype |                                                                  |
// |--------------|--------------------|-------|------------------------------------------------------------------|
// | key_scale    | [128]              | fp32  | what keys were divided by before they were rotated               |
// | k, v         | [n, KV, 128]       | bf16  | of the piece, at positions past, past + 1, ...; 16 bytes         |
// | keys, values | [KV, room, 128]    | bf16  | out; zeros at `zeros` positions behind the piece                 |
// | row          |                    | int64 | of the tables; then past, n, zeros                               |
// | then, for 2, 3, 4, 8 and 16 bits: payload, scales, ids, table, counts, as bucketed_attention; used: pages  |
// | of the row that are read, 0 where a tier is not there; wide: pages of a row of the table                   |
//
// Grid: (units of all tiers, 32 slots each, then those of n + zeros, KV); threads: 256. A slot whose id is no
// position below `past` is left out.
#include "sm80/bucketed_put.cuh"

constexpr int PITCH = 136;  // of a token's levels: rows of a store lie in different banks
using Levels = u16[2][32][PITCH];

struct Tier {
    const unsigned char* payload;
    const u16* scales;
    const int *ids, *table, *counts;
    int wide;  // pages of a row of the table
};

struct Row {
    const float4* key_scale;
    u16 *keys, *values;
    long long row, past;
    int room;

    // Channels 4 * lane .. 4 * lane + 3 of a key or value.
    __device__ __forceinline__ void put(long long position, bool is_value, uint2 four) const {
        u16* to = (is_value ? values : keys) + (static_cast<long long>(blockIdx.y) * room + position) * 128;
        reinterpret_cast<uint2*>(to)[threadIdx.x % 32] = four;
    }
};

// Pair x of a lane (kv/bucketed/packing.py), two levels in its halves.
__device__ __forceinline__ void spread_pair(Levels& levels, int x, int lane, bool is_value, u32 pair) {
    const int row = x / 16 * 8, column = x % 16 * 8, g = lane / 4, q = lane % 4 * 2;
    if (is_value) {
        levels[1][row + q][column + g] = static_cast<u16>(pair);
        levels[1][row + q + 1][column + g] = static_cast<u16>(pair >> 16);
    } else {
        *reinterpret_cast<u32*>(&levels[0][row + g][column + q]) = pair;
    }
}

// A unit's levels, from its words.
template <int BITS>
__device__ __forceinline__ void spread(Levels& levels, const u32* keys, const u32* values) {
    constexpr int WORDS = 128 * BITS;  // of keys, and of values
    constexpr u32 MASK = ((1u << BITS % 32) - 1) * 0x00010001u;
    for (int i = threadIdx.x; i < 2 * WORDS; i += 256) {
        const bool is_value = i >= WORDS;
        const u32* words = is_value ? values : keys;
        const int at = i % WORDS, word = at / 128 * 4 + at % 4, lane = at % 128 / 4;
        const u32 bits = words[at];
        if (BITS == 3) {
            const int group = word / 3 * 16, of = word % 3;
#pragma unroll
            for (int f = 0; f < 5; ++f)
                spread_pair(levels, group + 5 * of + f, lane, is_value, bits >> 3 * f & MASK);
            if (of == 0) {
                u32 last = 0;
#pragma unroll
                for (int j = 0; j < 3; ++j) {
                    const int other = word + j;
                    last |= (words[other / 4 * 128 + lane * 4 + other % 4] >> 15 & 0x00010001u) << j;
                }
                spread_pair(levels, group + 15, lane, is_value, last);
            }
        } else {
            constexpr int FIELDS = 16 / BITS;
#pragma unroll
            for (int f = 0; f < FIELDS; ++f)
                spread_pair(levels, word * FIELDS + f, lane, is_value, bits >> BITS * f & MASK);
        }
    }
}

// Unit `unit` of a row in a tier.
template <int BITS>
__device__ __forceinline__ void unpack(Levels& levels, const Tier& tier, const Row& row, int unit) {
    constexpr float HALF = ((1 << BITS) - 1) * 0.5f;
    const int head = blockIdx.y, kv_heads = gridDim.y, slot = unit * 32, in = slot % PAGE;
    const int count = tier.counts[row.row];
    if (slot >= count) return;
    const int page = tier.table[row.row * tier.wide + slot / PAGE];
    const u64 of = static_cast<u64>(page) * kv_heads + head;
    const unsigned char* from = tier.payload + of * (2 * PAGE * 16 * BITS) + in * (16 * BITS);
    spread<BITS>(levels, reinterpret_cast<const u32*>(from),
                 reinterpret_cast<const u32*>(from + PAGE * 16 * BITS));
    __syncthreads();
    const u16* scales = tier.scales + of * (PAGE * 2) + in * 2;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, is_value = warp / 4;
#pragma unroll 2
    for (int i = 0; i < 8; ++i) {
        const int t = warp % 4 * 8 + i, at = (t % 8 * 4 + t / 8) * 2;
        const int id = tier.ids[static_cast<u64>(page) * PAGE + in + t];
        const bool held = slot + t < count && !(first_of_fp16(scales[at]) < 0.0f);
        if (!held || id < 0 || id >= row.past) continue;
        const float by = first_of_fp16(scales[at + is_value]);
        const uint2 four = *reinterpret_cast<const uint2*>(&levels[is_value][t][4 * lane]);
        const u32 each[4] = {four.x & 0xffffu, four.x >> 16, four.y & 0xffffu, four.y >> 16};
        float x[4];
#pragma unroll
        for (int c = 0; c < 4; ++c)
            x[c] = __fmul_rn(BITS == 16 ? first_of(each[c]) : static_cast<float>(each[c]) - HALF, by);
        hadamard(x);
        if (!is_value) {
            const float4 scale = row.key_scale[lane];
            x[0] *= scale.x, x[1] *= scale.y, x[2] *= scale.z, x[3] *= scale.w;
        }
        row.put(id, is_value, make_uint2(pack(x[0], x[1]), pack(x[2], x[3])));
    }
}

extern "C" __global__ void __launch_bounds__(256)
    bucketed_unpack(const float4* key_scale, const u16* k, const u16* v, u16* keys, u16* values,
                    long long row_of, long long past, long long n, long long zeros,  //
                    const unsigned char* payload_2, const u16* scales_2, const int* ids_2, const int* table_2,
                    const int* counts_2, const unsigned char* payload_3, const u16* scales_3,
                    const int* ids_3, const int* table_3, const int* counts_3, const unsigned char* payload_4,
                    const u16* scales_4, const int* ids_4, const int* table_4, const int* counts_4,
                    const unsigned char* payload_8, const u16* scales_8, const int* ids_8, const int* table_8,
                    const int* counts_8, const unsigned char* payload_16, const u16* scales_16,
                    const int* ids_16, const int* table_16, const int* counts_16, int used_2, int used_3,
                    int used_4, int used_8, int used_16, int wide_2, int wide_3, int wide_4, int wide_8,
                    int wide_16, int room) {
    alignas(16) __shared__ Levels levels;
    wait_for_predecessor();
    let_successor_start();
    const Row row{key_scale, keys, values, row_of, past, room};
    constexpr int UNITS = PAGE / 32;
    int unit = blockIdx.x;
    // Whether the unit is one of these pages; else it is one behind them.
    const auto in = [&](int used) {
        const bool here = unit < used * UNITS;
        if (!here) unit -= used * UNITS;
        return here;
    };
    if (in(used_2))
        return unpack<2>(levels, Tier{payload_2, scales_2, ids_2, table_2, counts_2, wide_2}, row, unit);
    if (in(used_3))
        return unpack<3>(levels, Tier{payload_3, scales_3, ids_3, table_3, counts_3, wide_3}, row, unit);
    if (in(used_4))
        return unpack<4>(levels, Tier{payload_4, scales_4, ids_4, table_4, counts_4, wide_4}, row, unit);
    if (in(used_8))
        return unpack<8>(levels, Tier{payload_8, scales_8, ids_8, table_8, counts_8, wide_8}, row, unit);
    if (in(used_16))
        return unpack<16>(levels, Tier{payload_16, scales_16, ids_16, table_16, counts_16, wide_16}, row,
                          unit);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, is_value = warp / 4;
    for (int t = unit * 32 + warp % 4; t < min(unit * 32 + 32, static_cast<int>(n + zeros)); t += 4) {
        uint2 four = make_uint2(0, 0);
        if (t < n)
            four = reinterpret_cast<const uint2*>((is_value ? v : k) +
                                                  (static_cast<u64>(t) * gridDim.y + blockIdx.y) * 128)[lane];
        row.put(past + t, is_value, four);
    }
}
