// Bytes of two words by a selector, with the mode that __byte_perm hides.
#pragma once

#include "common/element.cuh"

// Byte i is that of nibble i of the selector: bits 0 .. 2 choose one of low's four bytes, then of high's;
// with bit 3 eight copies of its high bit.
__device__ __forceinline__ u32 select_bytes(u32 low, u32 high, u32 selector) {
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
    return out;
}
