// SPDX-License-Identifier: Apache-2.0
// Few tokens in one node: 8 bytes travel as 4 bytes of data and the number of the call, twice. A word arrives
// whole, so a rank that finds the number has the data: one hop, without a fence, a flag or a barrier.
//
// What a rank puts lies in two halves of the target's memory, used by turns. A rank ends a call when every
// rank has said that it entered it, and no rank enters a call before it ended the one before. So call n
// writes where call n - 2 was read. Nobody waits for another rank's end.
//
// Blocks: (SMs of a rank, ranks), all resident; threads: CHANNELS
// * 32.
#pragma once

#include "combine/node.cuh"

__device__ __forceinline__ void put(u64* to, u32 first, u32 second, u32 number) {
    const u64 flag = static_cast<u64>(number) << 32;
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(flag | first),
                 "l"(flag | second)
                 : "memory");
}

// Whether both words of this call are there.
__device__ __forceinline__ bool take(const u64* from, u32 number, u32& first, u32& second) {
    u64 a, b;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
    first = static_cast<u32>(a);
    second = static_cast<u32>(b);
    return a >> 32 == number && b >> 32 == number;
}

__device__ __forceinline__ void put_vector(u64* to, uint4 v, u32 number) {
    put(to, v.x, v.y, number);
    put(to + 2, v.z, v.w, number);
}

__device__ __forceinline__ bool take_vector(const u64* from, u32 number, uint4& v) {
    const bool first = take(from, number, v.x, v.y), second = take(from + 2, number, v.z, v.w);
    return first && second;
}

// Block 0 of a kernel that waits for no word of each rank.
__device__ __forceinline__ void wait_for_entries(const Node& node, const NodeShared& shared) {
    const int lane = threadIdx.x % 32;
    const auto entered = [&] {
        return lane >= R || reached(load_relaxed_sys(node.ready(node.g.rank, lane)), shared.call + 1);
    };
    node.g.until(entered, lane, RECEIVER);
}

// A block's last act, after it found that every rank entered the call.
__device__ __forceinline__ void finish(const Node& node, const NodeShared& shared) {
    workers_sync();
    if (threadIdx.x != 0) return;
    *node.calls() = shared.call + 1;
    atomicAdd(&node.g.status(node.g.rank)->ended, 1u);
}
