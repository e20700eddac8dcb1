// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies from global to shared memory that fill with zeros what they do not copy.
#pragma once

#include "common/copies.cuh"

// SIZE (4, 8 or 16) bytes at `to`: the first `bytes` from `from`, zeros after them. bytes 0 reads nothing.
template <int SIZE>
__device__ __forceinline__ void copy_or_zero(u32 to, const void* from, int bytes) {
    if constexpr (SIZE == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(SIZE),
                     "r"(bytes)
                     : "memory");
}
