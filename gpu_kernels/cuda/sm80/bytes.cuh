// SPDX-License-Identifier: Apache-2.0
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

// (word & mask) | bits, in one instruction.
__device__ __forceinline__ u32 and_or(u32 word, u32 mask, u32 bits) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(word), "r"(mask), "r"(bits));
    return out;
}

// Rotated left.
__device__ __forceinline__ u32 rotated(u32 word, u32 bits) { return __funnelshift_l(word, word, bits); }

// Bits of `set` where the mask has ones, those of `flip`, inverted, elsewhere, in one instruction.
__device__ __forceinline__ u32 select_or_flip(u32 set, u32 flip, u32 mask) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xb1;" : "=r"(out) : "r"(set), "r"(flip), "r"(mask));
    return out;
}

// Bits of `flip`, inverted, where the mask has ones, those of `keep` elsewhere, in one instruction.
__device__ __forceinline__ u32 flip_or_select(u32 flip, u32 keep, u32 mask) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0x4e;" : "=r"(out) : "r"(flip), "r"(keep), "r"(mask));
    return out;
}
