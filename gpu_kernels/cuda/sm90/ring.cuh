// Stages of shared memory that some threads fill and others use up, one after the other.
#pragma once

#include "common/element.cuh"

// Place in a ring, and the parity of its barriers' phase.
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
