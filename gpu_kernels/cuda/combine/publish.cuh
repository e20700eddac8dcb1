// SPDX-License-Identifier: Apache-2.0
// What a block publishes: tails of rows that it put, heads of rows that it read, and that this rank lives.
//
// A warp that put a row writes its count to shared memory; so does one that read a row. The coordinator sees
// the counts of all channels, and makes one fence for all of them: a fence of the whole system takes a round
// trip to the peers, and fences of one multiprocessor wait for each other.
#pragma once

#include "combine/rings.cuh"

// A block's rings, by channel, then by other end: (other, far) inside a node, then nodes.
struct Shared {
    volatile u32 read[CHANNELS * RINGS];  // items that this block's consumers have read
    volatile u32 put[CHANNELS * RINGS];   // items that its producers have put
    u32 left;                             // warps that work
};

__device__ __forceinline__ int entry_inside(int other, int far) { return other * R_INTER + far; }
__device__ __forceinline__ int entry_between(int node) { return R_INTRA * R_INTER + node; }

// A warp's rows on their way: each lane has a ring, or none.
template <class Carrier>
struct Sends {
    Carrier& carrier;
    volatile u32* put;  // of this lane's ring
    u32 items;          // put or on their way
    u32 history;        // bit n: the row n before the last is one of this lane's
    int pending;        // rows not published

    __device__ Sends(Carrier& carrier, volatile u32* put, bool some)
        : carrier(carrier), put(put), items(some ? *put : 0), history(0), pending(0) {}

    // The whole warp: all rows but the last `most` are at their targets.
    template <int MOST>
    __device__ void settle() {
        if (pending <= MOST) return;
        carrier.template settle<MOST>();
        __syncwarp();
        __threadfence_block();
        while (pending > MOST) {
            --pending;
            if (history >> pending & 1) *put = *put + 1;
        }
    }

    __device__ void sent(bool mine) {
        history = history << 1 | mine;
        items += mine;
        ++pending;
    }
};

// The counts of a lane's rings, from the heap.
__device__ __forceinline__ void load_counts(const Group& g, Shared& shared, int first) {
    for (int at = threadIdx.x; at < CHANNELS * RINGS; at += blockDim.x) {
        const int ring = at % RINGS * g.C + first + at / RINGS;
        shared.read[at] = *g.got(ring);
        shared.put[at] = *g.sent(ring);
    }
}

// One warp of the block: publishes until no warp works.
__device__ void coordinate(const Group& g, Shared& shared) {
    const int lane = threadIdx.x % 32, first = blockIdx.x * CHANNELS;
    Status* status = g.status(g.rank);
    constexpr int EACH = (CHANNELS * RINGS + 31) / 32;
    u32 gave[EACH], told[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int at = i * 32 + lane;
        gave[i] = at < CHANNELS * RINGS ? *g.got(at % RINGS * g.C + first + at / RINGS) : 0;
        told[i] = at < CHANNELS * RINGS ? *g.sent(at % RINGS * g.C + first + at / RINGS) : 0;
    }
    const bool beats = blockIdx.x == 0 && lane == 0;
    u32 beat = beats ? load_relaxed_sys(&status->beat) : 0;
    for (u32 looks = 1;; ++looks) {
        const bool last = __any_sync(ALL, *const_cast<volatile u32*>(&shared.left) == 0);
        __syncwarp();
        __threadfence_block();
        u32 read[EACH], put[EACH];
        bool news = false;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int at = i * 32 + lane;
            read[i] = at < CHANNELS * RINGS ? shared.read[at] : 0;
            put[i] = at < CHANNELS * RINGS ? shared.put[at] : 0;
            news |= read[i] != gave[i] || put[i] != told[i];
        }
        if (last) {  // for the next launch
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int at = i * 32 + lane, ring = at % RINGS * g.C + first + at / RINGS;
                if (at >= CHANNELS * RINGS) continue;
                *g.got(ring) = read[i];
                *g.sent(ring) = put[i];
            }
        }
        if (lane == 0 && last) atomicAdd(&status->ended, 1u);
        if (__any_sync(ALL, news)) fence_sys();
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int at = i * 32 + lane, ch = first + at / RINGS, entry = at % RINGS;
            if (at >= CHANNELS * RINGS) continue;
            const bool inside = entry < R_INTRA * R_INTER;
            const int node = entry - R_INTRA * R_INTER, far = entry % R_INTER;
            const int peer = inside ? g.node * R_INTRA + entry / R_INTER : node * R_INTRA + g.local;
            const int ring = inside ? g.inside(g.local, far, ch) : g.between(g.node, ch);
            if (put[i] != told[i]) release_tail(g, peer, ring, put[i], put[i] - told[i]);
            if (read[i] != gave[i]) return_head(g, peer, ring, read[i], read[i] - gave[i]);
            gave[i] = read[i];
            told[i] = put[i];
        }
        if (last) break;
        if (beats && !(STALLS == g.rank)) store_relaxed_sys(&status->beat, ++beat);
        if (looks % 256 == 0 && __any_sync(ALL, g.aborted())) return;
    }
    if (blockIdx.x != 0) return;
    // other blocks may still wait for peers: this rank lives until they end
    const u32 all = load_relaxed_sys(&status->entered) * gridDim.x;
    for (u32 looks = 1; load_relaxed_sys(&status->ended) != all; ++looks) {
        if (beats && !(STALLS == g.rank)) store_relaxed_sys(&status->beat, ++beat);
        if (looks % 256 == 0 && __any_sync(ALL, g.aborted())) return;
    }
}
