// SPDX-License-Identifier: Apache-2.0
// Keys and values of a step's tokens into the high tier, one token a row: norm of heads, RoPE, rotation,
// quantisation and packing in one launch; heads of 128 channels.
//
// | argument   | shape                     | dtype  |                                                         |
// |------------|---------------------------|--------|---------------------------------------------------------|
// | x          | [T, Q + 2 KV, 128]        | bf16   | NORM: heads of q, k, v. Else the keys [T, KV, 128]      |
// | v          | [T, KV, 128]              | bf16   | values; NORM: null                                      |
// | q_norm, k_norm | [128]                 | bf16   | NORM                                                    |
// | cos, sin   | [T, 64]                   | bf16   | NORM: of each token's position                          |
// | rows, positions | [T]                  | int64  | row of the table, position                              |
// | num_tokens | []                        | int32  | or null: tokens from it on are written nowhere          |
// | q          | [T, Q, 128]               | bf16   | out; NORM                                               |
// | key_scale  | [128]                     | fp32   | what keys are divided by before they are rotated        |
// | payload, scales, ids, table |          |        | out; of the tier, as bucketed_attention; ids: null      |
// |            |                           |        | where another layer writes them                         |
//
// A token's slot follows from its position: the first `sinks` have their own, the others take turns in a
// ring. The kernel reads all but x and v before it waits for its predecessor: see head_norm_rope. Grid:
// ceil(T * (Q + 2 KV) / 4); threads: 128, a warp for each head of a token. Every byte of the tier is what
// kv/bucketed/storage.py's put_tokens writes.
#include "sm80/bucketed_put.cuh"

#ifndef NORM
#define NORM 1
#endif

extern "C" __global__ void __launch_bounds__(128)
    bucketed_write(const u16* x, const u16* v, const u16* q_norm, const u16* k_norm, const u16* cos,
                   const u16* sin, const long long* rows, const long long* positions, const int* num_tokens,
                   u16* q, const float4* key_scale, unsigned char* payload, u16* scales, int* ids,
                   const int* table, float eps, int T, int heads, int kv_heads, int wide, int sinks,
                   int ring) {
    const int lane = threadIdx.x % 32, all = heads + 2 * kv_heads;
    const int at = blockIdx.x * 4 + threadIdx.x / 32, t = at / all, head = at % all;
    let_successor_start();
    const bool is_q = head < heads, values = head >= heads + kv_heads;
    const int own = values ? head - heads - kv_heads : head - heads;
    float norm[4], c[4], s[4];
    if (NORM && t < T && !values) {
        four_of(norm, (is_q ? q_norm : k_norm) + 4 * lane);
        four_of(c, cos + t * 64 + lane % 16 * 4);
        four_of(s, sin + t * 64 + lane % 16 * 4);
    }
    int position = 0, slot = 0;
    u64 page = 0;
    float4 by{};
    bool kept = false;
    if (t < T && !is_q) {
        position = static_cast<int>(positions[t]), slot = slot_of(position, sinks, ring);
        page = static_cast<u64>(table[rows[t] * wide + slot / PAGE]);
        by = values ? by : key_scale[lane];
        kept = !num_tokens || t < *num_tokens;
    }
    wait_for_predecessor();
    if (t >= T) return;
    float one[4];
    if (NORM)
        four_of(one, x + (static_cast<u64>(t) * all + head) * 128 + 4 * lane);
    else
        four_of(one, (values ? v : x) + (static_cast<u64>(t) * kv_heads + own) * 128 + 4 * lane);
    if (NORM && !values) {
        const float squares[4] = {one[0] * one[0], one[1] * one[1], one[2] * one[2], one[3] * one[3]};
        const float by = rsqrtf(sum_of_channels(squares) / 128 + eps);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float mine = one[i] * by * norm[i];
            const float other = __shfl_xor_sync(~0u, mine, 16);
            one[i] = lane < 16 ? mine * c[i] - other * s[i] : mine * c[i] + other * s[i];
        }
        const uint2 words = make_uint2(pack(one[0], one[1]), pack(one[2], one[3]));
        if (is_q) {
            reinterpret_cast<uint2*>(q + (static_cast<u64>(t) * heads + head) * 128)[lane] = words;
            return;
        }
        one[0] = first_of(words.x), one[1] = second_of(words.x);
        one[2] = first_of(words.y), one[3] = second_of(words.y);
    }
    if (!kept) return;
    turn(one, by, values);
    HighTier{payload, scales, kv_heads}.put(one, page, own, slot % PAGE, values);
    if (ids && lane == 0 && own == 0 && !values) ids[page * PAGE + slot % PAGE] = position;
}
