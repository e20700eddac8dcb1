// SPDX-License-Identifier: Apache-2.0
// Warpgroup products: sums [64 x N] += A [64 x 16] * B [16 x N], both operands in shared memory, K-major,
// 128-byte swizzle. N is a multiple of 8; N / 2 sums a thread: of row 16 * warp + lane / 4 (+ 8 for the third
// and fourth of each four), columns 8 * j + 2 * (lane % 4) and the next.
#pragma once

#include "common/element.cuh"

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
#define R168 R160 ", " R(80, 81, 82, 83)
#define R176 R168 ", " R(84, 85, 86, 87)
#define R184 R176 ", " R(88, 89, 90, 91)
#define R192 R184 ", " R(92, 93, 94, 95)
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
#define D168 D160, D(80)
#define D176 D168, D(84)
#define D184 D176, D(88)
#define D192 D184, D(92)

#define PRODUCT(N, A, B, ADD)                                                                            \
    template <>                                                                                          \
    __device__ __forceinline__ void product<N>(float* d, u64 a, u64 b, bool add) {                       \
        asm volatile("{.reg .pred add; setp.ne.b32 add, %" #ADD                                          \
                     ", 0;\n"                                                                            \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16." TYPES " {" R##N "}, %" #A ", %" #B    \
                                                                                   ", add, 1, 1, 0, 0;}" \
                     : D##N                                                                              \
                     : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                      \
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
    "wgmma.mma_async.sync.aligned.m64n" #N "k16." TYPES " {" R##N "}, a, b, " ADD ", 1, 1, 0, 0;\n"
#define PRODUCTS(N, A, B, ADD)                                                                             \
    template <>                                                                                            \
    __device__ __forceinline__ void products<N>(float* d, u64 a, u64 b, bool add) {                        \
        asm volatile(                                                                                      \
            "{.reg .pred add, always; .reg .b64 a, b, first_a, first_b;\n"                                 \
            "setp.ne.b32 add, %" #ADD                                                                      \
            ", 0; setp.eq.b32 always, 0, 0;\n"                                                             \
            "mov.b64 first_a, %" #A "; mov.b64 first_b, %" #B ";\n" STEP(N, 0, "add") STEP(N, 2, "always") \
                STEP(N, 4, "always") STEP(N, 6, "always") "}"                                              \
            : D##N                                                                                         \
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
        "wgmma.mma_async.sync.aligned.m64n128k16." TYPES " {" R128
        "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;}"
        : D128
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
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16." TYPES " {" R##N                      \
                     "}, {" R(A0, A1, A2, A3) "}, %" #B ", add, 1, 1, 0;}"                              \
                     : D##N                                                                             \
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

#undef R
#undef D
#undef TYPES
