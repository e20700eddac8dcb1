// What is said of memory in PTX. Copies from global to shared memory that threads start and do not wait for
// (cp.async, sm_80 and newer); how caches are to treat what is read once.
#pragma once

#include "common/element.cuh"

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void copy_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// This thread's copies since the last call are a group.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the last LEFT groups of this thread have landed.
template <int LEFT>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Of memory that nothing reads again soon and no kernel writes: weights.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
    uint4 words;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from));
    return words;
}

// 128 bytes that nobody reads again need not go to memory: they lose their value, once `after` is made.
__device__ __forceinline__ void discard_line(const u16* line, float after) {
    asm volatile("discard.global.L2 [%0], 128;  // %1" ::"l"(line), "f"(after) : "memory");
}
