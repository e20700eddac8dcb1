// SPDX-License-Identifier: Apache-2.0
// Words that all lanes of a warp bring to an exchange, for software_atoms.cuh.
#pragma once

#include "common/element.cuh"

#define OUT_OF_LINE static __device__ __noinline__

template <int WORDS>
struct Lanes {
    u32 own[WORDS];
    // All lanes call it together, with one word.
    __device__ __forceinline__ u32 of(int lane, int word) const { return __shfl_sync(~0u, own[word], lane); }
    __device__ __forceinline__ void bring() const {}
    __device__ __forceinline__ void leave() const {}
};

// Two bytes of a 16-byte row of shared memory.
__device__ __forceinline__ u32 load_two_bytes(u32 row, int offset) {
    u16 bytes;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bytes) : "r"(row + offset) : "memory");
    return bytes;
}
