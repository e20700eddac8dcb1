// SPDX-License-Identifier: Apache-2.0
// In place of gpu_kernels/cuda/sm120/copies.cuh.
#pragma once

#include "common/copies.cuh"

template <int SIZE>
inline void copy_or_zero(u32 to, const void* from, int bytes) {
    if (reinterpret_cast<uintptr_t>(from) % SIZE) emulator::fail("a copy from global memory begins between");
    if (bytes < 0 || bytes > SIZE) emulator::fail("a copy of more bytes than it has");
    const emulator::Copy copy{to, from, bytes, SIZE - bytes};
    if (!emulator::late) emulator::land(copy);
    emulator::fibers[emulator::current].open.push_back(copy);
}
