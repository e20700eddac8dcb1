// SPDX-License-Identifier: Apache-2.0
// A ring of shared-memory stages between producers and consumers.
#pragma once

#include "common/element.cuh"

// Position in a ring, and the phase parity of its barriers.
template <int COUNT>
struct Turn {
    int at = 0;
    u32 parity = 0;

    __device__ __forceinline__ void next() {
        if (++at == COUNT) {
            at = 0;
            parity ^= 1;
        }
    }
};
