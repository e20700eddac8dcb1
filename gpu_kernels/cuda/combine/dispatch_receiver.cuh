// SPDX-License-Identifier: Apache-2.0
// Dispatch: rows from rings, and of this rank, to their places.
#pragma once

#include "combine/dispatch_warp.cuh"

__device__ void Warp::receive(const Found& found) {
    // lane c: tokens of rank c: own ones, or those that rank (node, c's local index) puts into a ring
    const int c = lane < R ? lane : 0, n_of = c / R_INTRA, la_of = c % R_INTRA;
    const bool comes = lane < R && la_of != g.local, some = comes || lane == g.rank;
    const int entry = entry_inside(la_of, n_of), ring = entry * g.C + ch;
    u32 got = comes ? counts[entry] : 0;
    const int most = __reduce_max_sync(ALL, lane < R ? found.tokens[lane] : 0);
    for (int t = ch; t < most; t += g.C) {
        u32 todo = __ballot_sync(ALL, some && numbers.has(c, t));
        const u32 row_of_lane = numbers.row(c, t);
        if (stalls((t - ch) / g.C, RECEIVER)) return;
        for (; todo; todo &= todo - 1) {
            const int s = __ffs(todo) - 1;
            const u32 a = __shfl_sync(ALL, row_of_lane, s);
            const unsigned char* from = x_row(t);
            const int* ids = own.ids + static_cast<u64>(t) * K;
            const float* weights = own.weights + static_cast<u64>(t) * K;
            if (s != g.rank) {
                const int into = __shfl_sync(ALL, ring, s);
                const u32 item = __shfl_sync(ALL, got, s);
                const int peer = g.node * R_INTRA + s % R_INTRA;
                if (!g.wait(lane == 0, g.tail(g.rank, into), item + 1, peer, RECEIVER)) return;
                from = g.data(g.rank, into, item);
                ids = ids_of(from);
                weights = reinterpret_cast<const float*>(ids + K);
            }
            carrier.reuse<TAKE_ROWS - 1>();
            carrier.fetch(from);
            deliver_pairs(a, ids, weights);
            carrier.arrive();
            carrier.put(row(a));
            carrier.commit();
            __syncwarp();
            __threadfence_block();
            if (lane == s && s != g.rank) counts[entry] = ++got;
        }
    }
}
