// SPDX-License-Identifier: Apache-2.0
// Dispatch: another node's rows, from a ring into the rings of this node's ranks.
#pragma once

#include "combine/dispatch_sender.cuh"

__device__ void Warp::forward(const Found& found) {
    // lane n: the stream from rank (n, local). lane of entry_inside(la, n): its ring to rank la of this node
    const int far = lane < R_INTER ? lane : 0, c = far * R_INTRA + g.local;
    const bool some = lane < R_INTER && far != g.node;
    const int e = lane < R ? lane : 0, la = e / R_INTER, n_of = e % R_INTER;
    const bool out = lane < R && la != g.local && n_of != g.node;
    const int peer = g.node * R_INTRA + la, ring = g.inside(g.local, n_of, ch);
    const u32* head = g.head(g.rank, e * g.C + ch);
    Sends<Carrier> sends(carrier, puts + e, out);
    u32 freed = out ? load_relaxed_sys(head) : 0;
    const int T = some ? found.tokens[c] : 0;
    const int most = __reduce_max_sync(ALL, T);
    u32 got = some ? counts[entry_between(far)] : 0;
    u32 to_ranks = some ? mask_at(c, ch) : 0;
    int number = 0;
    for (int t = ch; t < most; t += g.C) {
        const u32 part = t < T ? to_ranks >> (g.node * R_INTRA) & NODE : 0;
        u32 todo = __ballot_sync(ALL, part != 0);
        to_ranks = some ? mask_at(c, t + g.C) : 0;
        for (; todo; todo &= todo - 1) {
            const int n = __ffs(todo) - 1, from_rank = n * R_INTRA + g.local;
            const u32 here = __shfl_sync(ALL, part, n);
            if (stalls(number++, FORWARDER)) return;
            const int into = g.between(n, ch);
            const u32 item = __shfl_sync(ALL, got, n);
            const bool there = reached(load_relaxed_sys(g.tail(g.rank, into)), item + 1);
            if (!__all_sync(ALL, there)) sends.settle<0>();
            if (!g.wait(lane == 0, g.tail(g.rank, into), item + 1, from_rank, FORWARDER)) return;
            const unsigned char* slot = g.data(g.rank, into, item);
            sends.settle<SEND_ROWS - 1>();
            carrier.fetch(slot);
            const bool wants = out && n_of == n && here >> la & 1;
            const bool may = credit(sends, wants, head, freed, peer, FORWARDER);
            carrier.arrive();
            if (!may) return;
            const int* ids = ids_of(slot);
            const float* weights = reinterpret_cast<const float*>(ids + K);
            for (u32 targets = __ballot_sync(ALL, wants); targets; targets &= targets - 1) {
                const int s = __ffs(targets) - 1;
                unsigned char* to = g.data(__shfl_sync(ALL, peer, s), __shfl_sync(ALL, ring, s),
                                           __shfl_sync(ALL, sends.items, s));
                carrier.put(to);
                put_pairs(to, ids, weights);
            }
            if (here >> g.local & 1) {
                const u32 a = numbers.row(from_rank, t);
                carrier.put(row(a));
                deliver_pairs(a, ids, weights);
            }
            carrier.commit();
            sends.sent(wants);
            __syncwarp();
            __threadfence_block();
            if (lane == n) counts[entry_between(n)] = ++got;
        }
    }
    sends.settle<0>();
}
