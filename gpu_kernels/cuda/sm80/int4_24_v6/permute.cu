// SPDX-License-Identifier: Apache-2.0
// Rows of hidden sorted by expert, where each expert's rows lie, and which experts have any.
//
// | argument   | shape   | dtype       | |
// |------------|---------|-------------|--------------------------------------------------------------------|
// | hidden     | [T, H]  | bf16        | 16 bytes                                                           |
// | row_tokens | [M]     | int32       | of routing_sort                                                    |
// | tiles      | [U]     | Tile        | of routing_sort with M rows a tile: one for each expert with a row |
// | num_tiles  | [1]     | int32       |                                                                    |
// | X_perm     | [M, H]  | bf16, out   | rows that no pair has are not written                              |
// | OffE       | [E + 1] | int32, out  | rows of expert e: OffE[e] .. OffE[e + 1] - 1                       |
// | Eids       | [U]     | int32, out  | experts with a row, ascending; then -1                             |
//
// H is a multiple of 8. Blocks: 1 + M. The first writes OffE and Eids, the others copy a row each.
#include "common/routing.cuh"

extern "C" __global__ void permute(const uint4* hidden, const int* row_tokens, const Tile* tiles,
                                   const int* num_tiles, uint4* X_perm, int* OffE, int* Eids, int H, int E,
                                   int U) {
    wait_for_predecessor();
    let_successor_start();
    const int n = *num_tiles, rows = n ? tiles[n - 1].first + tiles[n - 1].rows : 0;
    if (blockIdx.x == 0) {
        for (int u = threadIdx.x; u < U; u += blockDim.x) Eids[u] = u < n ? tiles[u].expert : -1;
        for (int u = threadIdx.x; u <= n; u += blockDim.x) {
            const int after = u ? tiles[u - 1].expert + 1 : 0, last = u < n ? tiles[u].expert : E;
            const int first = u < n ? tiles[u].first : rows;
            for (int e = after; e <= last; ++e) OffE[e] = first;
        }
        return;
    }
    const int row = blockIdx.x - 1;
    if (row >= rows) return;
    const u64 to = static_cast<u64>(row) * (H / 8), from = static_cast<u64>(row_tokens[row]) * (H / 8);
    for (int i = threadIdx.x; i < H / 8; i += blockDim.x) X_perm[to + i] = hidden[from + i];
}
