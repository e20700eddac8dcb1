// SPDX-License-Identifier: Apache-2.0
// Sparse warpgroup products, with A in registers: products [64 x N] = A [64 x 32] * B [32 x N], and bulk
// copies of data that is read once.
//
// A and its metadata as in sm80/sparse.cuh, where each warp has 16 of the 64 rows, and lanes 0 and 1 of four
// give the metadata. B: K-major in shared memory, as sm90/wgmma.cuh's `operand` says. A step of 32 along K is
// twice OPERAND_STEP.
#pragma once

#include "sm90/ptx.cuh"
#include "sm90/wgmma.cuh"

// Products are added to d, or replace it. SELECTOR: 0, lanes 0 and 1 of four give the metadata; 1, lanes 2
// and 3. The second form is of fp16, the first of bf16, with up to 32 columns.
template <int N, int SELECTOR>
__device__ __forceinline__ void sparse_product(float* d, const u32* a, u32 metadata, u64 b, bool add);
template <int N, int SELECTOR>
__device__ __forceinline__ void sparse_product_fp16(float* d, const u32* a, u32 metadata, u64 b, bool add);

#define R(a, b, c, d) "%" #a ", %" #b ", %" #c ", %" #d
#define D(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R8 R(0, 1, 2, 3)
#define R16 R8 ", " R(4, 5, 6, 7)
#define R24 R16 ", " R(8, 9, 10, 11)
#define R32 R24 ", " R(12, 13, 14, 15)
#define R40 R32 ", " R(16, 17, 18, 19)
#define R48 R40 ", " R(20, 21, 22, 23)
#define R56 R48 ", " R(24, 25, 26, 27)
#define R64 R56 ", " R(28, 29, 30, 31)
#define R72 R64 ", " R(32, 33, 34, 35)
#define R80 R72 ", " R(36, 37, 38, 39)
#define R88 R80 ", " R(40, 41, 42, 43)
#define R96 R88 ", " R(44, 45, 46, 47)
#define R104 R96 ", " R(48, 49, 50, 51)
#define R112 R104 ", " R(52, 53, 54, 55)
#define R120 R112 ", " R(56, 57, 58, 59)
#define R128 R120 ", " R(60, 61, 62, 63)
#define R136 R128 ", " R(64, 65, 66, 67)
#define R144 R136 ", " R(68, 69, 70, 71)
#define R152 R144 ", " R(72, 73, 74, 75)
#define R160 R152 ", " R(76, 77, 78, 79)
#define D8 D(0)
#define D16 D8, D(4)
#define D24 D16, D(8)
#define D32 D24, D(12)
#define D40 D32, D(16)
#define D48 D40, D(20)
#define D56 D48, D(24)
#define D64 D56, D(28)
#define D72 D64, D(32)
#define D80 D72, D(36)
#define D88 D80, D(40)
#define D96 D88, D(44)
#define D104 D96, D(48)
#define D112 D104, D(52)
#define D120 D112, D(56)
#define D128 D120, D(60)
#define D136 D128, D(64)
#define D144 D136, D(68)
#define D152 D144, D(72)
#define D160 D152, D(76)

#define PRODUCT_OF(NAME, TYPE, SELECTOR, N, A0, A1, A2, A3, B, METADATA, ADD)                             \
    template <>                                                                                           \
    __device__ __forceinline__ void NAME<N, SELECTOR>(float* d, const u32* a, u32 metadata, u64 b,        \
                                                      bool add) {                                         \
        asm volatile("{.reg .pred add; setp.ne.b32 add, %" #ADD                                           \
                     ", 0;\n"                                                                             \
                     "wgmma.mma_async.sp.sync.aligned.m64n" #N "k32.f32." #TYPE "." #TYPE " {" R##N       \
                     "}, {" R(A0, A1, A2, A3) "}, %" #B ", %" #METADATA ", " #SELECTOR ", add, 1, 1, 0;}" \
                     : D##N                                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(metadata),                 \
                       "r"(static_cast<int>(add)));                                                       \
    }
#define BF16(...)                                    \
    PRODUCT_OF(sparse_product, bf16, 0, __VA_ARGS__) \
    PRODUCT_OF(sparse_product, bf16, 1, __VA_ARGS__)
#define PRODUCT(...)                                     \
    PRODUCT_OF(sparse_product_fp16, f16, 0, __VA_ARGS__) \
    PRODUCT_OF(sparse_product_fp16, f16, 1, __VA_ARGS__)
BF16(8, 4, 5, 6, 7, 8, 9, 10)
BF16(16, 8, 9, 10, 11, 12, 13, 14)
BF16(24, 12, 13, 14, 15, 16, 17, 18)
BF16(32, 16, 17, 18, 19, 20, 21, 22)
PRODUCT(8, 4, 5, 6, 7, 8, 9, 10)
PRODUCT(16, 8, 9, 10, 11, 12, 13, 14)
PRODUCT(24, 12, 13, 14, 15, 16, 17, 18)
PRODUCT(32, 16, 17, 18, 19, 20, 21, 22)
PRODUCT(40, 20, 21, 22, 23, 24, 25, 26)
PRODUCT(48, 24, 25, 26, 27, 28, 29, 30)
PRODUCT(56, 28, 29, 30, 31, 32, 33, 34)
PRODUCT(64, 32, 33, 34, 35, 36, 37, 38)
PRODUCT(80, 40, 41, 42, 43, 44, 45, 46)
PRODUCT(96, 48, 49, 50, 51, 52, 53, 54)
PRODUCT(112, 56, 57, 58, 59, 60, 61, 62)
PRODUCT(128, 64, 65, 66, 67, 68, 69, 70)
PRODUCT(144, 72, 73, 74, 75, 76, 77, 78)
PRODUCT(160, 80, 81, 82, 83, 84, 85, 86)
#undef BF16
#undef PRODUCT
#undef PRODUCT_OF
#undef R
#undef D

// As `advance`, by an addition that the compiler leaves alone: else it masks each sum.
__device__ __forceinline__ u64 further(u64 operand, u32 by) {
    u32 low;
    asm("add.u32 %0, %1, %2;" : "=r"(low) : "r"(static_cast<u32>(operand)), "r"(by));
    return (operand & 0xffffffff00000000) | low;
}

// Both halves are the low one, or the high one. As an operand of instructions of two halves this costs no
// instruction.
__device__ __forceinline__ u32 low_twice(u32 value) {
    u32 out;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}" : "=r"(out) : "r"(value));
    return out;
}

__device__ __forceinline__ u32 high_twice(u32 value) {
    u32 out;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}" : "=r"(out) : "r"(value));
    return out;
}

__device__ __forceinline__ void copy_8(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// The same value, of which the compiler knows nothing: what follows from it is not computed early.
__device__ __forceinline__ int later(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Contiguous bytes, a multiple of 16, with an L2 eviction policy.
__device__ __forceinline__ void bytes_load(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
        "[%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
