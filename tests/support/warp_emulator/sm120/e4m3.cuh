// SPDX-License-Identifier: Apache-2.0
// In place of gpu_kernels/cuda/sm120/e4m3.cuh.
#pragma once

#include "common/element.cuh"

inline u32 e4m3_of(float value) {
    const u32 sign = std::signbit(value) ? 0x80 : 0;
    if (std::isnan(value)) return sign | 0x7f;
    const float least = 0x1p-9f, a = std::abs(value);
    if (a >= 448.0f) return sign | 0x7e;
    // between numbers of 2^-9 below 2^-6, else of three bits after the first
    const int exponent = a < 0x1p-6f ? -6 : std::ilogb(a);
    const float step = std::max(std::ldexp(1.0f, exponent - 3), least);
    const int units = static_cast<int>(std::nearbyint(a / step));  // ties to even
    return sign | static_cast<u32>(units + (exponent + 6) * 8);
}

inline u32 pack_e4m3(float first, float second) { return e4m3_of(first) | e4m3_of(second) << 8; }
