// SPDX-License-Identifier: Apache-2.0
// Block-scaled warp products of compute capability 12.x (mma.sync), and the load of FP4 operands (ldmatrix).
// SOFTWARE_ATOMS: software_atoms.cuh in place of the instructions; it has the layouts of the fragments.
#pragma once

#include "sm80/mma.cuh"

#ifndef SOFTWARE_ATOMS
#define SOFTWARE_ATOMS 0
#endif

#if SOFTWARE_ATOMS
#include "sm120/software_atoms.cuh"
#else

// Four matrices of 8 rows of 16 FP4 numbers: lane l gives the address of row l % 8 of matrix l / 8, and gets
// four numbers of row l / 4 of each: a byte each, in its low four bits. A row is 8 bytes of numbers, then 8
// bytes of padding.
__device__ __forceinline__ void load_fp4_matrices(u32 (&words)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.b4x16_p64 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

// sums [16 x 8] += (A [16 x 32] * scale_A) * (B [32 x 8] * scale_B). FP4_A: A is e2m1 and B e4m3, else the
// reverse. Byte BYTE of scale_a and scale_b counts.
template <bool FP4_A, int BYTE>
__device__ __forceinline__ void multiply_scaled(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                u32 scale_a, u32 scale_b) {
    if constexpr (FP4_A)
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X"
            ".f32.e2m1.e4m3.f32.ue8m0 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {%12, 0}, %11, {%12, 0};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scale_a), "r"(scale_b),
              "n"(BYTE));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X"
            ".f32.e4m3.e2m1.f32.ue8m0 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {%12, 0}, %11, {%12, 0};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scale_a), "r"(scale_b),
              "n"(BYTE));
}

// The same of e2m1 alone, packed: A [16 x 64], B [64 x 8]. Bytes BYTE (0 or 2) and BYTE + 1 of the scales are
// of k 0 .. 31 and 32 .. 63.
template <int BYTE>
__device__ __forceinline__ void multiply_scaled_fp4(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                    u32 scale_a, u32 scale_b) {
    asm volatile(
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.scale_vec::2X"
        ".f32.e2m1.e2m1.f32.ue8m0 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {%12, 0}, %11, {%12, 0};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scale_a), "r"(scale_b),
          "n"(BYTE));
}
#endif
