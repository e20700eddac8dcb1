// SPDX-License-Identifier: Apache-2.0
// In place of gpu_kernels/cuda/common/flags.cuh.
#pragma once

#include "common/element.cuh"

inline int load_acquire(const int* from) {
    emulator::pause();
    return *from;
}

inline void add_release(int* to, int value) {
    *to += value;
    emulator::tell();
}

inline int add_acquire_release(int* to, int value) {
    const int before = std::exchange(*to, *to + value);
    emulator::tell();
    return before;
}
