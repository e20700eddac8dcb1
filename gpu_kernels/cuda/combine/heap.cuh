// SPDX-License-Identifier: Apache-2.0
// The status of a rank, and loads and stores between GPUs.
#pragma once

#include "common/element.cuh"

constexpr int R = R_INTER * R_INTRA;
constexpr int RINGS = (R_INTRA + 1) * R_INTER;  // a channel, into one rank
constexpr u32 ALL = 0xffffffffu;
static_assert(R <= 32, "a lane for each rank");

enum Role : int { OUTSIDE, SENDER, FORWARDER, RECEIVER, COORDINATOR, ANNOUNCER };

struct Status {
    u32 beat, entered, ended,
        aborted;  // ended counts blocks; aborted: 1 once claimed, 2 once the report is whole
    u32 peer, role, call, reporter;
    u64 told;      // by a rank of another node (network.cuh): 0, or its report in one word
    u32 taken[2];  // items that a warp has, by parity of the call: of one node's kernels
    u32 unused[52];
};

__device__ __forceinline__ u32 load_acquire_sys(const u32* from) {
    u32 word;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

__device__ __forceinline__ u32 load_relaxed_sys(const u32* from) {
    u32 word;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

__device__ __forceinline__ u64 load_relaxed_sys(const u64* from) {
    u64 word;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}

__device__ __forceinline__ void store_relaxed_sys(u64* to, u64 word) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

__device__ __forceinline__ void store_release_sys(u32* to, u32 word) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(u32* to, u32 word) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

// Reads and writes that this warp knows of, before its writes that follow.
__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ bool reached(u32 counter, u32 count) {
    return static_cast<int>(counter - count) >= 0;
}

template <class C>
__device__ __forceinline__ Status* status_of(const C& call, int r) {
    return reinterpret_cast<Status*>(call.heaps[r]);
}

// The first report to a rank stays. r: a rank whose heap has an address here.
template <class C>
__device__ __forceinline__ void report(const C& call, int r, int peer, int role, u32 entered, int reporter) {
    if (atomicCAS_system(&status_of(call, r)->aborted, 0u, 1u) != 0) return;
    Status* to = status_of(call, r);
    store_relaxed_sys(&to->peer, peer);
    store_relaxed_sys(&to->role, role);
    store_relaxed_sys(&to->call, entered);
    store_relaxed_sys(&to->reporter, reporter);
    store_release_sys(&to->aborted, 2u);
}
