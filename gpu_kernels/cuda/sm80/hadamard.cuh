// SPDX-License-Identifier: Apache-2.0
// The Hadamard matrix of 128 channels, four a lane.
#pragma once

#include "common/element.cuh"

// x times Sylvester's matrix / sqrt(128), in place; a lane has channels 4 * lane .. 4 * lane + 3 of a row.
__device__ __forceinline__ void hadamard(float (&x)[4]) {
    const float a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], d = x[2] - x[3];
    x[0] = a + c, x[1] = b + d, x[2] = a - c, x[3] = b - d;
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(~0u, x[i], step);
            x[i] = threadIdx.x & step ? other - x[i] : x[i] + other;
        }
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] *= 0.08838834764831845f;
}

__device__ __forceinline__ void hadamard(float4& x) {
    float four[4] = {x.x, x.y, x.z, x.w};
    hadamard(four);
    x = make_float4(four[0], four[1], four[2], four[3]);
}
