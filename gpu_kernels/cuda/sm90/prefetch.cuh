// SPDX-License-Identifier: Apache-2.0
// Bytes of global memory, asked for before they are read.
#pragma once

#include "common/element.cuh"

// To L2; from and bytes are multiples of 16.
__device__ __forceinline__ void prefetch_bytes(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
