// SPDX-License-Identifier: Apache-2.0
// The end of a down product of few tokens: the weighted sum of a token's experts. OUT32: out is fp32. ADD:
// out is added to.
#pragma once

#include "common/element.cuh"

#ifndef OUT32
#define OUT32 0
#endif
#ifndef ADD
#define ADD 0
#endif

// out[at] (+)= the sum over ascending k of parts[k][column], in fp32, one rounding.
template <int EXPERTS, int WIDTH>
__device__ __forceinline__ void write_sum(const float (&parts)[EXPERTS][WIDTH], int column, void* out,
                                          u64 at) {
    float total = 0.0f;
#if ADD && OUT32
    total = static_cast<const float*>(out)[at];
#elif ADD
    total = first_of(static_cast<const u16*>(out)[at]);
#endif
#pragma unroll
    for (int k = 0; k < EXPERTS; ++k) total += parts[k][column];
#if OUT32
    static_cast<float*>(out)[at] = total;
#else
    static_cast<u16*>(out)[at] = static_cast<u16>(pack(total, 0.0f));
#endif
}
