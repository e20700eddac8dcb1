// SPDX-License-Identifier: Apache-2.0
// In place of gpu_kernels/cuda/sm90/prefetch.cuh.
#pragma once

#include "common/element.cuh"

inline void prefetch_bytes(const void* from, u32 bytes) {
    if (reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) emulator::fail("a prefetch that is not aligned");
}
