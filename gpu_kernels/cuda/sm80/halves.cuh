// SPDX-License-Identifier: Apache-2.0
// fp16 numbers beside bf16 ones: products, conversions; and powers of two.
#pragma once

#include "common/element.cuh"

// As multiply_add of mma.cuh, for fp16, whatever FP16 says. Denormal operands count.
__device__ __forceinline__ void multiply_add_fp16(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 pack_fp16(float first, float second) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

// Two products of fp16 each, and a * b + c, in one instruction.
__device__ __forceinline__ u32 multiply_fp16x2(u32 a, u32 b) {
    u32 out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

__device__ __forceinline__ u32 multiply_add_fp16x2(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

__device__ __forceinline__ float first_of_fp16(u32 word) {
    float value;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(value) : "r"(word));
    return value;
}

__device__ __forceinline__ float second_of_fp16(u32 word) {
    float value;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(value) : "r"(word));
    return value;
}

// A half in both halves: no instruction where it is an operand of fp16.
__device__ __forceinline__ u32 first_in_both(u32 word) {
    u32 out;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; mov.b32 %0, {a, a};}" : "=r"(out) : "r"(word));
    return out;
}

__device__ __forceinline__ u32 second_in_both(u32 word) {
    u32 out;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; mov.b32 %0, {b, b};}" : "=r"(out) : "r"(word));
    return out;
}

__device__ __forceinline__ float power_of_two(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

__device__ __forceinline__ float logarithm_to_two(float x) {
    float value;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

__device__ __forceinline__ float inverse_of(float x) {
    float value;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}
