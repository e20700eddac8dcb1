// SPDX-License-Identifier: Apache-2.0
// To e4m3 numbers.
#pragma once

#include "common/element.cuh"

// Two numbers as two bytes, the first in the low one: to nearest, ties to even; beyond 448: 448.
__device__ __forceinline__ u32 pack_e4m3(float first, float second) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
}
