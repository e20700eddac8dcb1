// SPDX-License-Identifier: Apache-2.0
// Memory instructions in PTX: asynchronous copies from global to shared memory (cp.async, sm_80 and newer),
// and cache hints for data that is read once.
#pragma once

#include "common/element.cuh"

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// first + row * bytes, in one instruction.
__device__ __forceinline__ u64 row_at(u64 first, u32 row, u32 bytes) {
    u64 at;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(row), "r"(bytes), "l"(first));
    return at;
}

__device__ __forceinline__ void copy_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// As copy_16, where `on`; without a branch.
__device__ __forceinline__ void copy_16_if(bool on, u32 to, const void* from) {
    asm volatile(
        "{.reg .pred p; setp.ne.s32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(to),
        "l"(from), "r"(static_cast<int>(on))
        : "memory");
}

// The L2 eviction policy of data that is read once.
__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void copy_16(u32 to, const void* from, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "l"(policy)
                 : "memory");
}

// 16 bytes, or zeros: nothing is read then.
__device__ __forceinline__ void copy_16_or_zeros(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_16_or_zeros(u32 to, const void* from, bool valid, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void copy_4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// The four bytes from any address on, or only the first `bytes` of them, to eight: from byte `from % 4` on.
// Before them lies the rest of their word, behind them zeros.
__device__ __forceinline__ void copy_unaligned_4(u32 to, u64 from, int bytes) {
    const int skipped = static_cast<int>(from % 4), end = max(skipped + bytes, 0);
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 4, %2; cp.async.ca.shared.global [%0 + 4], [%1 + 4], 4, %3;" ::
            "r"(to),
        "l"(from - skipped), "r"(min(end, 4)), "r"(max(end - 4, 0))
        : "memory");
}

// Commit this thread's copies since the last call as a group.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until all but the last LEFT groups of this thread have landed.
template <int LEFT>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// For memory that is read once and that no kernel writes: weights. LINE: L2 gets all 128 bytes around them,
// which others read at about the same time.
template <bool LINE = false>
__device__ __forceinline__ uint4 load_once(const uint4* from) {
    uint4 words;
    if (LINE)
        asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                     : "l"(from));
    else
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                     : "l"(from));
    return words;
}

// The same, 8 bytes.
__device__ __forceinline__ uint2 load_once_8(const void* from) {
    uint2 words;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(words.x), "=r"(words.y)
                 : "l"(from));
    return words;
}

// Past L1: what other blocks wrote, behind an acquire.
__device__ __forceinline__ uint4 load_there(const uint4* from) {
    uint4 words;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from)
                 : "memory");
    return words;
}

// From shared memory.
__device__ __forceinline__ uint4 load_16(u32 from) {
    uint4 words;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(from)
                 : "memory");
    return words;
}

__device__ __forceinline__ uint2 load_8(u32 from) {
    uint2 words;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(from) : "memory");
    return words;
}

// Discard 128 bytes from L2 without write-back; their value is lost. Ordered after the computation of
// `after`.
__device__ __forceinline__ void discard_line(const u16* line, float after) {
    asm volatile("discard.global.L2 [%0], 128;  // %1" ::"l"(line), "f"(after) : "memory");
}
