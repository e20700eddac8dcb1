// SPDX-License-Identifier: Apache-2.0
// Between nodes by address: every rank of the group reads and writes every other rank's heap.
//
// The five calls of the transport. network.cuh has the same ones for ranks that no address reaches.
//
// | call             | here                                                  |
// |------------------|-------------------------------------------------------|
// | put slot         | slot_between: sums are stored into the target's slot  |
// | release tail     | release_tail                                          |
// | acquire wait     | Group::wait                                           |
// | return credit    | return_head                                           |
// | abort            | tell, dead; look finds who stopped                    |
#pragma once

#include "combine/heap.cuh"

struct Link {};  // what a call needs besides addresses

// Where rank reads the status of r.
template <class C>
__device__ __forceinline__ const Status* look(const C& call, int rank, int r) {
    return status_of(call, r);
}

template <class C>
__device__ __forceinline__ void tell(const C& call, int rank, int r, int peer, int role, u32 entered) {
    report(call, r, peer, role, entered, rank);
}

template <class C>
__device__ __forceinline__ bool dead(const C& call, int rank) {
    return load_relaxed_sys(&status_of(call, rank)->aborted) != 0;
}

// Where a forwarder stores an item for rank to.
template <class G>
__device__ __forceinline__ unsigned char* slot_between(const G& g, int to, int ring, u32 item) {
    return g.data(to, ring, item);
}

// One lane, after fence_sys: tail items are put, more than at the last call.
template <class G>
__device__ __forceinline__ void release_tail(const G& g, int to, int ring, u32 tail, u32 more) {
    store_relaxed_sys(g.tail(to, ring), tail);
}

// One lane, after fence_sys: the source may reuse head slots, more than at the last call.
template <class G>
__device__ __forceinline__ void return_head(const G& g, int source, int ring, u32 head, u32 more) {
    store_relaxed_sys(g.head(source, ring), head);
}
