// SPDX-License-Identifier: Apache-2.0
// What part of a step's attention each page got: sums the weights that bucketed_attention wrote down.
//
// | argument | shape                                | dtype |                                                       |
// |----------|--------------------------------------|-------|-------------------------------------------------------|
// | weights  | [T, KV, most_pieces, width]          | fp32  | log2 of the weights of a piece: its `mass`            |
// | whole    | [T, N, KV * GROUP]                   | fp32  | log2 of the sum of all weights                        |
// | rows, num_tokens, table, counts |               |       | as bucketed_attention                                 |
// | mass     | [pages], for each tier               | fp32  | added to: the sum over queries and heads; no two rows |
// |          |                                      |       | share a page                                          |
//
// Grid: (ceil((wide_2 + .. + wide_16) / 4), T); threads: 128, a warp for each page of a row.
#include "sm80/halves.cuh"

#ifndef PAGE
#define PAGE 64
#endif
#ifndef GROUP
#define GROUP 8
#endif
#ifndef QUERIES
#define QUERIES 1
#endif

extern "C" __global__ void __launch_bounds__(128)
    page_mass(const float* weights, const float* whole, const long long* rows, const int* num_tokens,
              float* mass_2, const int* table_2, const int* counts_2, float* mass_3, const int* table_3,
              const int* counts_3, float* mass_4, const int* table_4, const int* counts_4, float* mass_8,
              const int* table_8, const int* counts_8, float* mass_16, const int* table_16,
              const int* counts_16, int wide_2, int wide_3, int wide_4, int wide_8, int wide_16,
              int most_pieces, int kv_heads, int width) {
    float* const masses[5] = {mass_2, mass_3, mass_4, mass_8, mass_16};
    const int* const tables[5] = {table_2, table_3, table_4, table_8, table_16};
    const int* const counts[5] = {counts_2, counts_3, counts_4, counts_8, counts_16};
    const int wide[5] = {wide_2, wide_3, wide_4, wide_8, wide_16};
    const int t = blockIdx.y, lane = threadIdx.x % 32;
    wait_for_predecessor();
    let_successor_start();
    if (num_tokens && t >= *num_tokens) return;
    const long long row = rows[t];
    int page = blockIdx.x * 4 + threadIdx.x / 32, first = 0;  // first: piece of the tier among the row's
#pragma unroll
    for (int kind = 0; kind < 5; ++kind) {
        if (!wide[kind]) continue;
        const int tokens = kind < 3 ? 32 : kind == 3 ? 16 : 8;
        const int count = max(0, min(counts[kind][row], wide[kind] * PAGE));
        if (page >= 0 && page < wide[kind] && page * PAGE < count) {
            const int all = min(PAGE, count - page * PAGE), parts = (all + tokens - 1) / tokens;
            float sum = 0;
            for (int i = lane; i < kv_heads * parts * (QUERIES * GROUP); i += 32) {
                const int r = i % (QUERIES * GROUP), part = i / (QUERIES * GROUP) % parts;
                const int head = i / (QUERIES * GROUP) / parts;
                const int at = first + page * (PAGE / tokens) + part;
                const float weight =
                    weights[((static_cast<u64>(t) * kv_heads + head) * most_pieces + at) * width + r];
                const u64 query = (static_cast<u64>(t) * QUERIES + r / GROUP) * (kv_heads * GROUP) +
                                  head * GROUP + r % GROUP;
                sum += power_of_two(weight - whole[query]);
            }
#pragma unroll
            for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (lane == 0) masses[kind][tables[kind][row * wide[kind] + page]] += sum;
        }
        page -= wide[kind];
        first += (count + tokens - 1) / tokens;
    }
}
