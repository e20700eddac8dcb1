// SPDX-License-Identifier: Apache-2.0
// Dispatch: rows of this rank into the rings of ranks of its node, and of forwarders.
#pragma once

#include "combine/dispatch_warp.cuh"

// Until each lane that wants it may put its next row. false: the group is dead.
__device__ __forceinline__ bool Warp::credit(Sends<Carrier>& sends, bool wants, const u32* head, u32& freed,
                                             int peer, int role) {
    const u32 want = sends.items + 1 - g.call.slots;
    const bool lacks = wants && !reached(freed, want);
    if (!__any_sync(ALL, lacks)) return true;
    sends.settle<0>();  // before any wait: a peer may need it to free the slot
    if (!g.wait(lacks, head, want, peer, role)) return false;
    if (lacks) freed = load_relaxed_sys(head);
    return true;
}

__device__ void Warp::send() {
    // lane r: the ring to rank r of this node, or to the forwarder of r's node
    const int r = lane < R ? lane : 0, n_of = r / R_INTRA, la_of = r % R_INTRA;
    const bool inside = lane < R && n_of == g.node && la_of != g.local;
    const bool far = lane < R && n_of != g.node && la_of == g.local;
    const int entry = n_of == g.node ? entry_inside(la_of, g.node) : entry_between(n_of);
    const int ring = n_of == g.node ? g.inside(g.local, g.node, ch) : g.between(g.node, ch);
    const u32* head = g.head(g.rank, entry * g.C + ch);
    Sends<Carrier> sends(carrier, puts + entry, inside || far);
    u32 freed = inside || far ? load_relaxed_sys(head) : 0;
    const u32 bits = inside ? 1u << r : far ? NODE << (n_of * R_INTRA) : 0;
    const int T = own_T();
    const auto part_of = [&](int t) {
        u32 part = 0;
        for (int k = lane; t < T && k < K; k += 32) part |= bit_of(own.ids[static_cast<u64>(t) * K + k]);
        return part;
    };
    u32 part = part_of(ch);
    int number = 0;
    for (int t = ch; t < T; t += g.C) {
        const bool wants = __reduce_or_sync(ALL, part) & bits;
        const u32 targets = __ballot_sync(ALL, wants);
        if (targets) {
            if (stalls(number++, SENDER)) return;
            sends.settle<SEND_ROWS - 1>();
            carrier.fetch(x_row(t));
        }
        part = part_of(t + g.C);
        if (!targets) continue;
        const bool may = credit(sends, wants, head, freed, r, SENDER);
        carrier.arrive();
        if (!may) return;
        for (u32 todo = targets; todo; todo &= todo - 1) {
            const int s = __ffs(todo) - 1;
            unsigned char* to = g.data(s, __shfl_sync(ALL, ring, s), __shfl_sync(ALL, sends.items, s));
            carrier.put(to);
            put_pairs(to, own.ids + static_cast<u64>(t) * K, own.weights + static_cast<u64>(t) * K);
        }
        carrier.commit();
        sends.sent(wants);
    }
    sends.settle<0>();
}
