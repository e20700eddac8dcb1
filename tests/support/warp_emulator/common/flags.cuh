// SPDX-License-Identifier: Apache-2.0
// In place of gpu_kernels/cuda/common/flags.cuh.
#pragma once

#include "common/element.cuh"

namespace emulator {

constexpr int MOST_POLLS = 1 << 20;
inline int polls;  // since the last write

}  // namespace emulator

inline int load_acquire(const int* from) {
    emulator::pause();
    if (++emulator::polls > emulator::MOST_POLLS) emulator::fail("nobody writes what it waits for");
    return *from;
}

inline void add_release(int* to, int value) {
    emulator::polls = 0;
    *to += value;
    ++emulator::events;
}

inline int add_acquire_release(int* to, int value) {
    emulator::pause();
    ++emulator::events;
    return std::exchange(*to, *to + value);
}
