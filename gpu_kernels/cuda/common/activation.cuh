// SPDX-License-Identifier: Apache-2.0
// What an expert computes between its products: ttnn_moe/activations.py.
#pragma once

#include "common/element.cuh"

#ifndef CLAMPED
#define CLAMPED 0  // 1: clamped_swiglu
#endif
#ifndef BIASED
#define BIASED 0
#endif

// A NaN stays one.
__device__ __forceinline__ float activated(float gate, float up) {
#if CLAMPED
    constexpr float ALPHA = 1.702f, LIMIT = 7.0f;
    gate = gate > LIMIT ? LIMIT : gate;
    up = up > LIMIT ? LIMIT : up < -LIMIT ? -LIMIT : up;
    return silu_mul(ALPHA * gate, (up + 1.0f) / ALPHA);
#else
    return silu_mul(gate, up);
#endif
}

// bf16 or fp32: the other pointer is null.
struct Biases {
    const u16* bf16;
    const float* fp32;

    __device__ __forceinline__ float operator[](u64 i) const {
#if BIASED
        return fp32 ? fp32[i] : __uint_as_float(static_cast<u32>(bf16[i]) << 16);
#else
        return 0.0f;
#endif
    }
};
