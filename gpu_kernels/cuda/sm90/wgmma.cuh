// SPDX-License-Identifier: Apache-2.0
// Warpgroup products: sums [64 x N] += A [64 x 16] * B [16 x N], both operands in shared memory, K-major,
// 128-byte swizzle. N is a multiple of 8; N / 2 sums a thread: of row 16 * warp + lane / 4 (+ 8 for the third
// and fourth of each four), columns 8 * j + 2 * (lane % 4) and the next.
#pragma once

#include "common/element.cuh"
#include "sm90/operand_lists.cuh"

// Descriptor of rows of 128 bytes. Eight rows are a swizzle atom of 1024 bytes, aligned to 1024.
__device__ __forceinline__ u64 operand(u32 address) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// Advance by 16 elements along K.
constexpr u64 OPERAND_STEP = 2;

// A descriptor further on, in units of 16 bytes: the address is in the low word, and stays there.
__device__ __forceinline__ u64 advance(u64 operand, u32 by) {
    return (operand & 0xffffffff00000000) | (static_cast<u32>(operand) + by);
}

// B in MN-major order: a row of 128 bytes holds 64 columns of one element of K, swizzled as above. The next
// 64 columns follow after `next` bytes.
__device__ __forceinline__ u64 columns(u32 address, u32 next) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | (static_cast<u64>(next >> 4) << 16) | (64ull << 32) |
           (1ull << 62);
}

// Advance by 16 rows.
constexpr u64 COLUMNS_STEP = 16 * 128 / 16;

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int LEFT>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Products are asynchronous: the compiler may not move accesses of this register across this line.
__device__ __forceinline__ void sum_here(float& sum) { asm volatile("" : "+f"(sum)::"memory"); }

template <int N>
__device__ __forceinline__ void product(float* d, u64 a, u64 b, bool add);

#if FP16
#define TYPES "f32.f16.f16"
#else
#define TYPES "f32.bf16.bf16"
#endif

#define PRODUCT(N, A, B, ADD)                                                           \
    template <>                                                                         \
    __device__ __forceinline__ void product<N>(float* d, u64 a, u64 b, bool add) {      \
        asm volatile("{.reg .pred add; setp.ne.b32 add, %" #ADD                         \
                     ", 0;\n"                                                           \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16." TYPES " {" NAMES_##N \
                     "}, %" #A ", %" #B ", add, 1, 1, 0, 0;}"                           \
                     : SUMS_##N                                                         \
                     : "l"(a), "l"(b), "r"(static_cast<int>(add)));                     \
    }
PRODUCT(8, 4, 5, 6)
PRODUCT(16, 8, 9, 10)
PRODUCT(24, 12, 13, 14)
PRODUCT(32, 16, 17, 18)
PRODUCT(40, 20, 21, 22)
PRODUCT(48, 24, 25, 26)
PRODUCT(56, 28, 29, 30)
PRODUCT(64, 32, 33, 34)
PRODUCT(72, 36, 37, 38)
PRODUCT(80, 40, 41, 42)
PRODUCT(88, 44, 45, 46)
PRODUCT(96, 48, 49, 50)
PRODUCT(104, 52, 53, 54)
PRODUCT(112, 56, 57, 58)
PRODUCT(120, 60, 61, 62)
PRODUCT(128, 64, 65, 66)
PRODUCT(136, 68, 69, 70)
PRODUCT(144, 72, 73, 74)
PRODUCT(152, 76, 77, 78)
PRODUCT(160, 80, 81, 82)
PRODUCT(168, 84, 85, 86)
PRODUCT(176, 88, 89, 90)
PRODUCT(184, 92, 93, 94)
PRODUCT(192, 96, 97, 98)
#undef PRODUCT

// The same for 64 elements along K: four products in one statement, which compiles faster than four.
template <int N>
__device__ __forceinline__ void products(float* d, u64 a, u64 b, bool add);

#define STEP(N, BY, ADD)                                    \
    "add.s64 a, first_a, " #BY "; add.s64 b, first_b, " #BY \
    ";\n"                                                   \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16." TYPES " {" NAMES_##N "}, a, b, " ADD ", 1, 1, 0, 0;\n"
#define PRODUCTS(N, A, B, ADD)                                                                             \
    template <>                                                                                            \
    __device__ __forceinline__ void products<N>(float* d, u64 a, u64 b, bool add) {                        \
        asm volatile(                                                                                      \
            "{.reg .pred add, always; .reg .b64 a, b, first_a, first_b;\n"                                 \
            "setp.ne.b32 add, %" #ADD                                                                      \
            ", 0; setp.eq.b32 always, 0, 0;\n"                                                             \
            "mov.b64 first_a, %" #A "; mov.b64 first_b, %" #B ";\n" STEP(N, 0, "add") STEP(N, 2, "always") \
                STEP(N, 4, "always") STEP(N, 6, "always") "}"                                              \
            : SUMS_##N                                                                                     \
            : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                 \
    }
PRODUCTS(8, 4, 5, 6)
PRODUCTS(16, 8, 9, 10)
PRODUCTS(24, 12, 13, 14)
PRODUCTS(32, 16, 17, 18)
PRODUCTS(40, 20, 21, 22)
PRODUCTS(48, 24, 25, 26)
PRODUCTS(56, 28, 29, 30)
PRODUCTS(64, 32, 33, 34)
PRODUCTS(72, 36, 37, 38)
PRODUCTS(80, 40, 41, 42)
PRODUCTS(88, 44, 45, 46)
PRODUCTS(96, 48, 49, 50)
PRODUCTS(104, 52, 53, 54)
PRODUCTS(112, 56, 57, 58)
PRODUCTS(120, 60, 61, 62)
PRODUCTS(128, 64, 65, 66)
PRODUCTS(136, 68, 69, 70)
PRODUCTS(144, 72, 73, 74)
PRODUCTS(152, 76, 77, 78)
PRODUCTS(160, 80, 81, 82)
PRODUCTS(168, 84, 85, 86)
PRODUCTS(176, 88, 89, 90)
PRODUCTS(184, 92, 93, 94)
PRODUCTS(192, 96, 97, 98)
#undef PRODUCTS
#undef STEP

// sums [64 x 128] += A * B with A in registers (of row 16 * warp + lane / 4, then of that + 8: columns
// 2 * (lane % 4) and the next, then the same of columns + 8), and B as `columns` says.
__device__ __forceinline__ void product_of_registers(float* d, const u32* a, u64 b, bool add) {
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16." TYPES " {" NAMES_128
        "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;}"
        : SUMS_128
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// sums [64 x N] += A * B with A in registers, as above, and B K-major in shared memory.
template <int N>
__device__ __forceinline__ void product_of_registers(float* d, const u32* a, u64 b, bool add);

#define PRODUCT(N, A0, A1, A2, A3, B, ADD)                                                              \
    template <>                                                                                         \
    __device__ __forceinline__ void product_of_registers<N>(float* d, const u32* a, u64 b, bool add) {  \
        asm volatile("{.reg .pred add; setp.ne.b32 add, %" #ADD                                         \
                     ", 0;\n"                                                                           \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16." TYPES " {" NAMES_##N                 \
                     "}, {" NAMES(A0, A1, A2, A3) "}, %" #B ", add, 1, 1, 0;}"                          \
                     : SUMS_##N                                                                         \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add))); \
    }
PRODUCT(8, 4, 5, 6, 7, 8, 9)
PRODUCT(16, 8, 9, 10, 11, 12, 13)
PRODUCT(24, 12, 13, 14, 15, 16, 17)
PRODUCT(32, 16, 17, 18, 19, 20, 21)
PRODUCT(40, 20, 21, 22, 23, 24, 25)
PRODUCT(48, 24, 25, 26, 27, 28, 29)
PRODUCT(56, 28, 29, 30, 31, 32, 33)
PRODUCT(64, 32, 33, 34, 35, 36, 37)
PRODUCT(72, 36, 37, 38, 39, 40, 41)
PRODUCT(80, 40, 41, 42, 43, 44, 45)
PRODUCT(88, 44, 45, 46, 47, 48, 49)
PRODUCT(96, 48, 49, 50, 51, 52, 53)
PRODUCT(104, 52, 53, 54, 55, 56, 57)
PRODUCT(112, 56, 57, 58, 59, 60, 61)
PRODUCT(120, 60, 61, 62, 63, 64, 65)
PRODUCT(128, 64, 65, 66, 67, 68, 69)
PRODUCT(136, 68, 69, 70, 71, 72, 73)
PRODUCT(144, 72, 73, 74, 75, 76, 77)
PRODUCT(152, 76, 77, 78, 79, 80, 81)
PRODUCT(160, 80, 81, 82, 83, 84, 85)
PRODUCT(168, 84, 85, 86, 87, 88, 89)
PRODUCT(176, 88, 89, 90, 91, 92, 93)
PRODUCT(184, 92, 93, 94, 95, 96, 97)
PRODUCT(192, 96, 97, 98, 99, 100, 101)
#undef PRODUCT

#undef TYPES
