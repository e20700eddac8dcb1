// SPDX-License-Identifier: Apache-2.0
// Rings between ranks: a rank's heap, its counters, waits that end, and who is to blame.
//
// | heap of a rank | bytes                        | written by |
// |----------------|------------------------------|----------------------------------------------------------|
// | Status         | 256                          | this rank; its report by any rank                        |
// | tails          | RINGS * C * 32, one u32 each | the producer of a ring into this rank                    |
// | heads          | the same                     | the consumer of a ring out of this rank                  |
// | got, sent      | RINGS * C * 4 each           | this rank: items of earlier calls                        |
// | slots          | RINGS * C * slots * slot     | the producer of a ring into this rank                    |
//
// Ring of channel ch, by its other end: inside a node (local * R_INTER + far) * C + ch, where far is the node
// at the other end of the stream; between nodes (R_INTRA * R_INTER + node) * C + ch.
#pragma once

#ifndef BEATS
#define BEATS 0
#endif
#if NETWORK
#include "combine/network.cuh"
#else
#include "combine/peers.cuh"
#endif

// Of one launch. Local: a rank of it, defined by the kernel.
struct Call : Link {
    u64 heaps[32];
    Local local[8];
    u64 timeout;                        // nanoseconds
    int H, T_max, slots, K, E, unused;  // K, E: of dispatch
};

// The whole warp: name the rank that stopped, to every rank. peer: the one that this warp waits for.
__device__ __noinline__ void blame(const Call& call, int rank, int peer, int role) {
    const int r = threadIdx.x % 32;
    const u32 entered = load_relaxed_sys(&status_of(call, rank)->entered);
    bool stopped = false, outside = false;
    if (r < R && r != rank) {
        const u32 before = load_relaxed_sys(&look(call, rank, r)->beat);
        // in parts: a GPU that stood still for other work lets the rank run again before the last of them
        for (int part = 0; part < 16; ++part) {
            const u64 start = nanoseconds();
            while (nanoseconds() - start < call.timeout / 64) __nanosleep(1000);
        }
        const Status* now = look(call, rank, r);
        const u32 its = load_relaxed_sys(&now->entered);
        const bool finished = load_relaxed_sys(&now->ended) == its * gridDim.x;
        outside = finished;
        stopped = load_relaxed_sys(&now->beat) == before && !(finished && reached(its, entered));
    }
    const u32 found = __ballot_sync(ALL, stopped);
    if (found && !(found >> peer & 1)) peer = __ffs(found) - 1;
    if (__ballot_sync(ALL, outside) >> peer & 1 && found) role = OUTSIDE;
    if (r < R) tell(call, rank, r, peer, role, entered);
    __syncwarp();
}

// One rank's view of the group.
struct Group {
    const Call& call;
    int rank, node, local, C, slot;  // slot: bytes

    __device__ Group(const Call& call, int rank, int C, int slot)
        : call(call), rank(rank), node(rank / R_INTRA), local(rank % R_INTRA), C(C), slot(slot) {}

    __device__ unsigned char* heap(int r) const { return reinterpret_cast<unsigned char*>(call.heaps[r]); }
    __device__ Status* status(int r) const { return reinterpret_cast<Status*>(heap(r)); }
    __device__ u32* tail(int r, int ring) const {
        return reinterpret_cast<u32*>(heap(r) + sizeof(Status)) + ring * 8;
    }
    __device__ u32* head(int r, int ring) const { return tail(r, RINGS * C + ring); }
    __device__ u32* got(int ring) const { return tail(rank, 2 * RINGS * C) + ring; }
    __device__ u32* sent(int ring) const { return got(RINGS * C + ring); }
    __device__ unsigned char* data(int r, int ring, u32 item) const {
        const u64 first = sizeof(Status) + static_cast<u64>(RINGS) * C * 72;
        const u64 n = static_cast<u64>(ring) * call.slots + (item & (call.slots - 1));
        return heap(r) + (first + 127) / 128 * 128 + n * slot;
    }
    __device__ int inside(int other, int far, int ch) const { return (other * R_INTER + far) * C + ch; }
    __device__ int between(int other, int ch) const { return (R_INTRA * R_INTER + other) * C + ch; }

    __device__ bool aborted() const { return dead(call, rank); }

    // The whole warp waits until met() holds in each lane. false: the group is dead. peer: whom the lane
    // waits for; met() may change it.
    template <class Met>
    __device__ bool until(Met met, const int& peer, int role) const {
        u64 start = 0;
        for (u32 looks = 1;; ++looks) {
            const u32 missing = __ballot_sync(ALL, !met());
            if (!missing) return true;
            if (looks % 256) continue;
            if (__any_sync(ALL, aborted())) return false;
            const u64 now = __shfl_sync(ALL, nanoseconds(), 0);
            if (!start) start = now;
#if BEATS  // no warp does it all the time
            if (STALLS != rank && threadIdx.x % 32 == 0)
                store_relaxed_sys(&status(rank)->beat, static_cast<u32>(now));
#endif
            if (now - start <= call.timeout || STALLS == rank) continue;
            blame(call, rank, __shfl_sync(ALL, peer, __ffs(missing) - 1), role);
            return false;
        }
    }
    // Until each active lane's counter, in this rank's heap, is at least count: acquire.
    __device__ bool wait(bool active, const u32* counter, u32 count, int peer, int role) const {
        return until([&] { return !active || reached(load_acquire_sys(counter), count); }, peer, role);
    }
};
