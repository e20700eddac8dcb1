// Bytes of two words by a selector, with the mode that __byte_perm hides; bits of two words by a mask.
#pragma once

#include "common/element.cuh"

// Byte i is that of nibble i of the selector: bits 0 .. 2 choose one of low's four bytes, then of high's;
// with bit 3 eight copies of its high bit.
__device__ __forceinline__ u32 select_bytes(u32 low, u32 high, u32 selector) {
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
    return out;
}

// Bits of `set` where the mask has ones, of `clear` elsewhere, in one instruction.
__device__ __forceinline__ u32 select_bits(u32 set, u32 clear, u32 mask) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(out) : "r"(set), "r"(clear), "r"(mask));
    return out;
}
