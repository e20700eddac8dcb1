// SPDX-License-Identifier: Apache-2.0
// The two-byte element type of hidden, weights and rows: bfloat16, or float16 where FP16 is 1. Sums are fp32.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#ifndef FP16
#define FP16 0
#endif

// Two elements in one word, the first in the low half; one rounding each.
__device__ __forceinline__ u32 pack(float first, float second) {
    u32 word;
#if FP16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
#endif
    return word;
}

__device__ __forceinline__ float first_of(u32 word) {
#if FP16
    float value;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(value) : "r"(word));
    return value;
#else
    return __uint_as_float(word << 16);
#endif
}

__device__ __forceinline__ float second_of(u32 word) {
#if FP16
    float value;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(value) : "r"(word));
    return value;
#else
    return __uint_as_float(word & 0xffff0000u);
#endif
}

// silu(gate) * up = gate / (1 + exp(-gate)) * up. gate = -inf: -inf * 0 is NaN, as in fp64.
__device__ __forceinline__ float silu_mul(float gate, float up) {
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(gate * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
    return gate * inverse * up;
}

// A block's dynamic shared memory.
__device__ __forceinline__ unsigned char* dynamic_memory() {
    extern __shared__ __align__(128) unsigned char dynamic[];
    return dynamic;
}

// Programmatic dependent launch. No-ops before sm_90, where launches do not overlap.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
