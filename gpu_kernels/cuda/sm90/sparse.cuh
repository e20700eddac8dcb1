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

#define PRODUCT_OF(NAME, TYPE, SELECTOR, N, A0, A1, A2, A3, B, METADATA, ADD)                            \
    template <>                                                                                          \
    __device__ __forceinline__ void NAME<N, SELECTOR>(float* d, const u32* a, u32 metadata, u64 b,       \
                                                      bool add) {                                        \
        asm volatile("{.reg .pred add; setp.ne.b32 add, %" #ADD                                          \
                     ", 0;\n"                                                                            \
                     "wgmma.mma_async.sp.sync.aligned.m64n" #N "k32.f32." #TYPE "." #TYPE " {" NAMES_##N \
                     "}, {" NAMES(A0, A1, A2, A3) "}, %" #B ", %" #METADATA ", " #SELECTOR               \
                                                  ", add, 1, 1, 0;}"                                     \
                     : SUMS_##N                                                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(metadata),                \
                       "r"(static_cast<int>(add)));                                                      \
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
