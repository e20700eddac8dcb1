// SPDX-License-Identifier: Apache-2.0
// Units of 32 tokens into low tiers, in all layers: tokens leave the high tier, or a step that staged them.
// Heads of 128 channels. One launch serves all tiers and rows.
//
// | argument   | shape                     | dtype |                                                          |
// |------------|---------------------------|-------|----------------------------------------------------------|
// | units      | [n, 8]                    | int32 | kind of the tier (2, 3, 4, 8, 16 bits: 0 .. 4), page,    |
// |            |                           |       | unit of the page; `first`, the position of the first     |
// |            |                           |       | token, or, with an order, what is added to it; where     |
// |            |                           |       | the unit's 32 begin in `order`, or -1; `past`, the       |
// |            |                           |       | positions below it are in the high tier; index of the    |
// |            |                           |       | step's token at position 0; the row's first page of the  |
// |            |                           |       | high tier                                                |
// | order      | [tokens]                  | int64 | or null                                                  |
// | k, v       | [layers, room, KV, 128]   | bf16  | of the step's tokens; or null                            |
// | key_scale  | [layers, 128]             | fp32  | what keys are divided by before they are rotated         |
// | payload, scales |                      |       | of the high tier, all layers, `pages` of each; a token   |
// |            |                           |       | that leaves it gets the key scale -1: out                |
// | then, for each kind: payload, scales, ids; out. `pages_*`: pages of a layer                              |
//
// Grid: (n, KV, layers); threads: 256. A block reads all its tokens before it writes, and no other block
// reads them.
#include "sm80/bucketed_put.cuh"

// A low tier in all layers.
struct Low {
    unsigned char* payload;
    u16* scales;
    int *ids, pages;
};

// A unit's words, from levels [2, 32, 128]: kv/bucketed/packing.py.
template <int BITS>
__device__ __forceinline__ void write_unit(const u16 (&levels)[2][32][128], unsigned char* payload) {
    constexpr int WORDS = 128 * BITS;  // of keys, and of values
    for (int i = threadIdx.x; i < 2 * WORDS; i += 256) {
        const bool values = i >= WORDS;
        const int at = i % WORDS, word = at / 128 * 4 + at % 4, lane = at % 128 / 4;
        const auto pair = [&](int x) -> u32 {
            const int row = lane / 4, column = lane % 4 * 2;
            const u16* low = values ? &levels[1][x / 16 * 8 + column][x % 16 * 8 + row]
                                    : &levels[0][x / 16 * 8 + row][x % 16 * 8 + column];
            return low[0] | static_cast<u32>(low[values ? 128 : 1]) << 16;
        };
        u32 out = 0;
        if (BITS == 3) {
            const int group = word / 3 * 16, of = word % 3;
#pragma unroll
            for (int f = 0; f < 5; ++f) out |= pair(group + 5 * of + f) << 3 * f;
            out |= (pair(group + 15) >> of & 0x00010001u) << 15;
        } else {
            constexpr int FIELDS = 16 / BITS;
#pragma unroll
            for (int f = 0; f < FIELDS; ++f) out |= pair(word * FIELDS + f) << BITS * f;
        }
        reinterpret_cast<u32*>(payload + (values ? PAGE * 16 * BITS : 0))[at] = out;
    }
}

// What a unit is made of, and where it goes.
struct Unit {
    HighTier high;
    const u16 *k, *v;  // of the layer's first token
    const float4* key_scale;
    const int* positions;
    u64 first_page;  // of the row in the high tier of the layer
    int head, past, staged, sinks, ring;

    __device__ __forceinline__ void get(float (&x)[4], int token, bool values) const {
        const int position = positions[token];
        if (position < past) {
            const int slot = slot_of(position, sinks, ring);
            high.get(x, first_page + static_cast<u32>(slot) / PAGE, head, slot % PAGE, values);
        } else {
            const u64 at = static_cast<u64>(position + staged) * high.kv_heads + head;
            four_of(x, (values ? v : k) + at * 128 + threadIdx.x % 32 * 4);
            turn(x, key_scale[threadIdx.x % 32], values);
        }
    }

    // where: kind, page, unit of the page.
    template <int BITS>
    __device__ __forceinline__ void fill(u16 (&levels)[2][32][128], const int4& where, const Low& low) const {
        const u64 of = (static_cast<u64>(blockIdx.z) * low.pages + where.y) * high.kv_heads + head;
        u16* scales = low.scales + of * (PAGE * 2) + where.z * 64;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, values = warp / 4;
#pragma unroll 2
        for (int i = 0; i < 8; ++i) {
            const int t = warp % 4 * 8 + i;
            float x[4];
            u32 found[4];
            get(x, t, values);
            const float by = quantised<BITS>(x, found);
            *reinterpret_cast<uint2*>(&levels[values][t][4 * lane]) =
                make_uint2(found[0] | found[1] << 16, found[2] | found[3] << 16);
            if (lane == 0) scales[(t % 8 * 4 + t / 8) * 2 + values] = scale_bits(by);
        }
        if (blockIdx.z == 0 && head == 0 && threadIdx.x < 32)
            low.ids[static_cast<u64>(where.y) * PAGE + where.z * 32 + lane] = positions[lane];
        __syncthreads();
        write_unit<BITS>(levels, low.payload + of * (2 * PAGE * 16 * BITS) + where.z * (512 * BITS));
    }
};

extern "C" __global__ void __launch_bounds__(256)
    bucketed_units(const int4* units, const long long* order, const u16* k, const u16* v,
                   const float4* key_scale, unsigned char* payload, u16* scales,  //
                   unsigned char* payload_2, u16* scales_2, int* ids_2, unsigned char* payload_3,
                   u16* scales_3, int* ids_3, unsigned char* payload_4, u16* scales_4, int* ids_4,
                   unsigned char* payload_8, u16* scales_8, int* ids_8, unsigned char* payload_16,
                   u16* scales_16, int* ids_16, int pages, int pages_2, int pages_3, int pages_4, int pages_8,
                   int pages_16, int room, int sinks, int ring) {
    alignas(16) __shared__ u16 levels[2][32][128];
    __shared__ int positions[32];
    const int head = blockIdx.y, kv_heads = gridDim.y, layer = blockIdx.z;
    const int lane = threadIdx.x % 32;
    const int4 where = units[2 * blockIdx.x], from = units[2 * blockIdx.x + 1];
    const int past = from.y, staged = from.z;
    if (threadIdx.x < 32)
        positions[lane] = where.w + (from.x < 0 ? lane : static_cast<int>(order[from.x + lane]));
    __syncthreads();
    const Unit one{HighTier{payload, scales, kv_heads},
                   k + static_cast<u64>(layer) * room * kv_heads * 128,
                   v + static_cast<u64>(layer) * room * kv_heads * 128,
                   key_scale + layer * 32,
                   positions,
                   static_cast<u64>(layer) * pages + from.w,
                   head,
                   past,
                   staged,
                   sinks,
                   ring};
    if (where.x == 0) one.fill<2>(levels, where, Low{payload_2, scales_2, ids_2, pages_2});
    if (where.x == 1) one.fill<3>(levels, where, Low{payload_3, scales_3, ids_3, pages_3});
    if (where.x == 2) one.fill<4>(levels, where, Low{payload_4, scales_4, ids_4, pages_4});
    if (where.x == 3) one.fill<8>(levels, where, Low{payload_8, scales_8, ids_8, pages_8});
    if (where.x == 4) one.fill<16>(levels, where, Low{payload_16, scales_16, ids_16, pages_16});
    // all tokens were read: the block met after that
    if (threadIdx.x < 32 && positions[lane] < past) {
        const int slot = slot_of(positions[lane], sinks, ring);
        u16& flag = *one.high.scale(one.first_page + static_cast<u32>(slot) / PAGE, head, slot % PAGE, false);
        flag = 0xbc00;  // -1
    }
}
