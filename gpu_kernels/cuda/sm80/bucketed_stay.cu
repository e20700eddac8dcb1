// SPDX-License-Identifier: Apache-2.0
// Tokens of prompts into the high tier of every layer: rotation, quantisation and packing in one launch.
//
// | argument   | shape                     | dtype |                                                          |
// |------------|---------------------------|-------|----------------------------------------------------------|
// | puts       | [n, 4]                    | int32 | page, slot of the page, index of the step's token,       |
// |            |                           |       | position                                                 |
// | k, v       | [layers, room, KV, 128]   | bf16  | of the step's tokens                                     |
// | key_scale  | [layers, 128]             | fp32  | what keys are divided by before they are rotated         |
// | payload, scales |                      |       | out; of the tier, all layers, `pages` of each            |
// | ids        | [pages, PAGE]             | int32 | out                                                      |
//
// Grid: (ceil(n * 2 KV / 8), layers); threads: 256, a warp for each key and value.
#include "sm80/bucketed_put.cuh"

extern "C" __global__ void __launch_bounds__(256)
    bucketed_stay(const int4* puts, const u16* k, const u16* v, const float4* key_scale,
                  unsigned char* payload, u16* scales, int* ids, int n, int room, int kv_heads, int pages) {
    const int lane = threadIdx.x % 32, layer = blockIdx.y;
    const int at = blockIdx.x * 8 + threadIdx.x / 32, which = at % (2 * kv_heads), head = which % kv_heads;
    if (at / (2 * kv_heads) >= n) return;
    const int4 one = puts[at / (2 * kv_heads)];
    const bool values = which >= kv_heads;
    float x[4];
    four_of(x,
            (values ? v : k) + ((static_cast<u64>(layer) * room + one.z) * kv_heads + head) * 128 + 4 * lane);
    turn(x, key_scale[layer * 32 + lane], values);
    const u64 page = static_cast<u64>(layer) * pages + one.x;
    HighTier{payload, scales, kv_heads}.put(x, page, head, one.y, values);
    if (layer == 0 && which == 0 && lane == 0) ids[static_cast<u64>(one.x) * PAGE + one.y] = one.w;
}
