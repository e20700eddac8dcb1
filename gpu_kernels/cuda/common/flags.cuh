// SPDX-License-Identifier: Apache-2.0
// Flags in global memory, between blocks of one launch.
#pragma once

#include "common/element.cuh"

__device__ __forceinline__ int load_acquire(const int* from) {
    int word;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

// Release: orders all that this thread wrote, or observed behind a barrier, before it.
__device__ __forceinline__ void add_release(int* to, int value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Acquire and release; gives what was there.
__device__ __forceinline__ int add_acquire_release(int* to, int value) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(to), "r"(value)
                 : "memory");
    return before;
}
