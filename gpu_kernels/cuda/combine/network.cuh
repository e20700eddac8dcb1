// SPDX-License-Identifier: Apache-2.0
// Between nodes by NCCL's device API (GIN): puts and signals into a window. Compiled, never run.
//
// The same calls as peers.cuh. Ranks of one node still use addresses; the heaps of other nodes have none.
//
// | call             | here                                                                              |
// |------------------|-----------------------------------------------------------------------------------|
// | put slot         | slot_between: sums are stored into a staging slot of this rank                    |
// | release tail     | release_tail: puts each staging slot; a strong signal adds 1 to the target's tail |
// | acquire wait     | Group::wait: a signal is a word of this rank's heap                               |
// | return credit    | return_head: a signal adds to the source's head                                   |
// | abort            | tell: one 8-byte put into Status::told of each rank; dead reads it                |
//
// | heap, after the slots | bytes                        | written by                                 |
// |-----------------------|------------------------------|--------------------------------------------|
// | staging               | R_INTER * C * slots * slot   | this rank's forwarders                     |
// | looks                 | R * 32                       | gets of other nodes' statuses              |
//
// A strong signal settles all earlier puts of its context to its peer. So a ring keeps to one context. A
// signal adds to 8 bytes, of which the low word is the counter; it wraps as counters do. A staging slot needs
// no wait of its own: its credit says that the target has read the item, so the put has read the slot.
//
// The launch has one rank; ranks are NCCL's. The host makes one window of the heaps (each of the same size,
// and zero at first), and a device communicator with full GIN connections, strong signals and VA signals. A
// post into a full queue waits without a timeout, until the host aborts the communicator.
#pragma once

#include <nccl_device.h>

#include "combine/heap.cuh"

constexpr int LOOK = 32;  // bytes of a status that its rank writes

struct Link {
    ncclDevComm comm;
    ncclWindow_t window;  // of the heaps
    u64 looks;            // bytes from the heap's start
};

__device__ __forceinline__ bool same_node(int a, int b) { return a / R_INTRA == b / R_INTRA; }

// Of a ring: its channel keeps to one context.
template <class G>
__device__ __forceinline__ ncclGin gin_of(const G& g, int ring) {
    return ncclGin(g.call.comm, ring % g.C % g.call.comm.ginContextCount);
}

template <class G>
__device__ __forceinline__ u64 offset_of(const G& g, const void* own) {
    return static_cast<const unsigned char*>(own) - g.heap(g.rank);
}

// Of another node: a copy of its status, after an eighth of the timeout. It is stale where no NIC answered.
template <class C>
__device__ __noinline__ const Status* look(const C& call, int rank, int r) {
    if (same_node(rank, r)) return status_of(call, r);
    const u64 at = call.looks + r * LOOK, start = nanoseconds();
    const ncclGin gin(call.comm, 0);
    gin.get(ncclTeamWorld(call.comm), r, call.window, 0, call.window, at, LOOK);
    while (nanoseconds() - start < call.timeout / 8) __nanosleep(1000);
    return reinterpret_cast<const Status*>(call.heaps[rank] + at);
}

template <class C>
__device__ __noinline__ void tell(const C& call, int rank, int r, int peer, int role, u32 entered) {
    if (same_node(rank, r)) return report(call, r, peer, role, entered, rank);
    const u64 word = static_cast<u64>(entered) << 32 | rank << 24 | role << 16 | peer << 8 | 1;
    const u64 told = reinterpret_cast<u64>(&status_of(call, rank)->told) - call.heaps[rank];
    const ncclGin gin(call.comm, 0);
    gin.putValue(ncclTeamWorld(call.comm), r, call.window, told, word);
}

// What another node told becomes this rank's report.
template <class C>
__device__ __forceinline__ bool dead(const C& call, int rank) {
    if (load_relaxed_sys(&status_of(call, rank)->aborted) != 0) return true;
    const u64 word = load_relaxed_sys(&status_of(call, rank)->told);
    if (word == 0) return false;
    report(call, rank, word >> 8 & 0xff, word >> 16 & 0xff, word >> 32, word >> 24 & 0xff);
    return true;
}

template <class G>
__device__ __forceinline__ unsigned char* slot_between(const G& g, int to, int ring, u32 item) {
    return g.data(g.rank, (RINGS + to / R_INTRA) * g.C + ring % g.C, item);
}

template <class G>
__device__ __noinline__ void release_tail(const G& g, int to, int ring, u32 tail, u32 more) {
    if (same_node(g.rank, to)) return store_relaxed_sys(g.tail(to, ring), tail);
    const ncclWindow_t window = g.call.window;
    const ncclGin_StrongVASignalAdd one{window, offset_of(g, g.tail(g.rank, ring)), 1};
    for (u32 item = tail - more; item != tail; ++item) {
        const u64 from = offset_of(g, slot_between(g, to, ring, item));
        const u64 slot = offset_of(g, g.data(g.rank, ring, item));
        gin_of(g, ring).put(ncclTeamWorld(g.call.comm), to, window, slot, window, from, g.slot, one);
    }
}

template <class G>
__device__ __noinline__ void return_head(const G& g, int source, int ring, u32 head, u32 more) {
    if (same_node(g.rank, source)) return store_relaxed_sys(g.head(source, ring), head);
    const ncclGin_WeakVASignalAdd given{g.call.window, offset_of(g, g.head(g.rank, ring)), more};
    gin_of(g, ring).signal(ncclTeamWorld(g.call.comm), source, given);
}
