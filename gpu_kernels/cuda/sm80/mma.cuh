// SPDX-License-Identifier: Apache-2.0
// Warp-level products (mma.sync) and the loads of their operands from shared memory: 8 x 8 matrices of
// two-byte elements.
#pragma once

#include "common/element.cuh"

// Four matrices: lane l gives the address of row l % 8 of matrix l / 8, and gets two elements of row l / 4 of
// each.
__device__ __forceinline__ void load_matrices(u32 (&words)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

// sums [16 x 8] += A [16 x 16] * B [16 x 8]. a: rows 0 .. 7 and 8 .. 15 of k 0 .. 7, then of k 8 .. 15; b0,
// b1: k 0 .. 7 and 8 .. 15. A lane's sums: row lane / 4, columns 2 * (lane % 4) and the next; then row lane /
// 4 + 8.
__device__ __forceinline__ void multiply_add(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if FP16
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
#endif
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A matrix, a word a lane, transposed.
__device__ __forceinline__ u32 transposed(u32 word) {
    u32 other;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(word));
    return other;
}
