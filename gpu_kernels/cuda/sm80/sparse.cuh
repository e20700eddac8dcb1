// SPDX-License-Identifier: Apache-2.0
// Sparse warp-level products of bf16 (mma.sp::ordered_metadata, m16n8k32), and what makes their operands.
#pragma once

#include "common/element.cuh"

// Four 8 x 8 matrices, transposed: lane l gives the address of row l % 8 of matrix l / 8, and gets two
// elements of column l / 4 of each: rows 2 * (l % 4) and the next. Of 32 rows of eight elements, row-major,
// these are the words of B [32 x 8].
__device__ __forceinline__ void load_transposed(u32 (&words)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

// sums [16 x 8] += A [16 x 32] * B [32 x 8]. A chunk is four channels, two of which A keeps. Lane l, t = l %
// 4: a: the kept pairs of chunk t of rows l / 4 and l / 4 + 8, then of chunk t + 4 of both. b: k 2t and 2t +
// 1 of column l / 4; then of k + 8, k + 16, k + 24. metadata: 4 bits a chunk, in the low half of row l / 4,
// in the high half of row l / 4 + 8. With SELECTOR 0 lanes t = 0 (chunks 0 .. 3) and 1 (chunks 4 .. 7) give
// it, with SELECTOR 1 lanes t = 2 and 3. sums: row l / 4, columns 2t and 2t + 1; then row l / 4 + 8.
template <int SELECTOR>
__device__ __forceinline__ void multiply_sparse(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[4],
                                                u32 metadata) {
    static_assert(SELECTOR == 0 || SELECTOR == 1, "a pair of lanes gives the metadata of m16n8k32");
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]),
          "r"(metadata), "n"(SELECTOR));
}

// The same for fp16. Denormal operands count.
template <int SELECTOR>
__device__ __forceinline__ void multiply_sparse_fp16(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[4],
                                                     u32 metadata) {
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]),
          "r"(metadata), "n"(SELECTOR));
}

// As multiply_sparse, where the two indices of a chunk may come in any order.
template <int SELECTOR>
__device__ __forceinline__ void multiply_unordered(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[4],
                                                   u32 metadata) {
    asm volatile(
        "mma.sp.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]),
          "r"(metadata), "n"(SELECTOR));
}

// Bytes of word (0 .. 3), or zeros (4 .. 7), chosen by the nibbles of `which`, all below 8.
__device__ __forceinline__ u32 choose_bytes(u32 word, u32 which) {
    u32 out;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(out) : "r"(word), "r"(which));
    return out;
}

// (a & b) ^ c in one instruction.
__device__ __forceinline__ u32 and_xor(u32 a, u32 b, u32 c) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

// a * b + c of two bf16 each, in one instruction.
__device__ __forceinline__ u32 multiply_add_bf16x2(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}
