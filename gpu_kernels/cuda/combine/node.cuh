// SPDX-License-Identifier: Apache-2.0
// Calls of the ranks of one node that need no ring: every rank reads and writes every other rank's memory in
// place.
//
// A multiprocessor moves about 52 bytes a nanosecond, in and out. A ring costs a row two passes more: into
// the slot's shared memory and out of it.
//
// | heap of a rank | bytes         | written by                                          |
// |----------------|---------------|-----------------------------------------------------|
// | Status         | 256           | this rank; its report by any rank                   |
// | ready          | R * 32        | each rank: entries, over all calls; not of dispatch |
// | done           | R * 32        | each rank: blocks that have ended, over all calls   |
// | calls          | gridDim.x * 4 | this rank: calls of each block                      |
// | the kernel's   |               | see there; 128 bytes aligned                        |
//
// A rank enters a call when its stream has used what the call before gave. It leaves the call when all ranks
// have done with its memory. Warps that wait show that their rank lives.
#pragma once

#define R_INTER 1
#define NETWORK 0
#define BEATS 1
#ifndef R_INTRA
#define R_INTRA 2
#endif
#ifndef CHANNELS
#define CHANNELS 7  // warps that work
#endif
#ifndef STALLS
#define STALLS -1  // of tests: a rank that stops, in this role, at its second item
#define STALL_ROLE 0
#endif
#ifndef BULK
#define BULK 0
#endif
#ifndef WIRE32
#define WIRE32 0
#endif
#ifndef SEND_ROWS
#define SEND_ROWS 1
#endif
#if BULK
#include "combine/bulk.cuh"
#else
#include "combine/vectors.cuh"
struct Pipe {};
#endif

__device__ __forceinline__ void add_sys(u32* to, u32 count) {
    asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(to), "r"(count) : "memory");
}

__device__ __forceinline__ void workers_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(CHANNELS * 32) : "memory");
}

// A word whose upper half is the number of its call: never 0, as memory starts.
__device__ __forceinline__ u32 number_of(u32 call) { return call + 1 ? call + 1 : 0x80000000u; }

struct NodeShared {
    u32 dead, call;
};

// A block's part in a call.
struct Node {
    const Group& g;

    __device__ u32* ready(int r, int by) const {
        return reinterpret_cast<u32*>(g.heap(r) + sizeof(Status)) + by * 8;
    }
    __device__ u32* done(int r, int by) const { return ready(r, R + by); }
    __device__ u32* calls() const { return ready(g.rank, 2 * R) + blockIdx.x; }
    __device__ unsigned char* rest(int r) const {
        const u64 first = sizeof(Status) + 2 * R * 32 + gridDim.x * 4;
        return g.heap(r) + (first + 127) / 128 * 128;
    }

    // One thread, before the block begins.
    __device__ void begin(NodeShared& shared) const {
        shared.dead = g.aborted();
        shared.call = *calls();
        if (blockIdx.x != 0) return;
        Status* status = g.status(g.rank);
        store_relaxed_sys(&status->entered, load_relaxed_sys(&status->entered) + 1);
        status->taken[(shared.call + 1) & 1] = 0;
    }

    // A warp's items: the first, then whichever no other warp of this rank has. Multiprocessors get unequal
    // parts of the link, so equal parts of the items would end at different times.
    __device__ int first(int warp) const { return warp * gridDim.x + blockIdx.x; }
    // One more of `count`. The atomic is under way until `claimed` reads it.
    __device__ u32 claim(const NodeShared& shared, int count) const {
        const u32 firsts = CHANNELS * gridDim.x;
        if (threadIdx.x % 32 != 0 || firsts >= count) return count;
        return atomicAdd(&g.status(g.rank)->taken[shared.call & 1], 1u) + firsts;
    }
    __device__ int claimed(u32 claim) const { return __shfl_sync(ALL, claim, 0); }

    // One warp: what this thread knows of is for all ranks to see.
    __device__ void enter() const {
        const int lane = threadIdx.x % 32;
        fence_sys();
        if (lane < R) add_sys(ready(lane, g.rank), 1);
    }
    // The whole warp waits for all ranks' entries. false: the group is dead.
    __device__ bool entered(u32 count, int role) const {
        const int lane = threadIdx.x % 32;
        return g.wait(lane < R, ready(g.rank, lane < R ? lane : 0), count, lane, role);
    }

    // The warps that work, each after its last access: the call ends when every rank's have come here.
    __device__ void end(const NodeShared& shared, int warp, int role) const {
        const int lane = threadIdx.x % 32;
        workers_sync();
        if (warp != 0) return;
        if (lane == 0) {
            *calls() = shared.call + 1;
            atomicAdd(&g.status(g.rank)->ended, 1u);
        }
        fence_sys();
        if (lane < R) add_sys(done(lane, g.rank), 1);
        if (blockIdx.x == 0)
            g.wait(lane < R, done(g.rank, lane < R ? lane : 0), (shared.call + 1) * gridDim.x, lane, role);
    }

    __device__ bool stalls(int items, int role) const {
        if (STALLS != g.rank || STALL_ROLE != role || items < 1) return false;
        while (!g.aborted()) __nanosleep(1000);
        return true;
    }
};
