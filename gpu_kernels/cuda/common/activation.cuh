// What an expert computes between its products: ttnn_moe/activations.py.
#pragma once

#include "common/element.cuh"

#ifndef CLAMPED
#define CLAMPED 0  // 1: clamped_swiglu
#endif
#ifndef BIASED
#define BIASED 0
#endif
#ifndef BIAS32
#define BIAS32 0  // biases are fp32, or else bf16
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

__device__ __forceinline__ float bias_at(const void* biases, u64 i) {
#if !BIASED
    return 0.0f;
#elif BIAS32
    return static_cast<const float*>(biases)[i];
#else
    return __uint_as_float(static_cast<u32>(static_cast<const u16*>(biases)[i]) << 16);
#endif
}
