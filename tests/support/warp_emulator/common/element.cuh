// SPDX-License-Identifier: Apache-2.0
// In place of gpu_kernels/cuda/common/element.cuh.
#pragma once

#include "warps.h"

using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

#if FP16
inline u16 bits_of(float value) {
    const _Float16 rounded = static_cast<_Float16>(value);
    u16 bits;
    std::memcpy(&bits, &rounded, 2);
    return bits;
}

inline float value_of(u16 bits) {
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return static_cast<float>(value);
}
#else
inline u16 bits_of(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    if (std::isnan(value)) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
}

inline float value_of(u16 bits) {
    const u32 word = static_cast<u32>(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}
#endif

inline u32 pack(float first, float second) {
    return bits_of(first) | static_cast<u32>(bits_of(second)) << 16;
}
inline float first_of(u32 word) { return value_of(word & 0xffff); }
inline float second_of(u32 word) { return value_of(word >> 16); }
inline float silu_mul(float gate, float up) { return gate / (1.0f + std::exp(-gate)) * up; }
inline unsigned char* dynamic_memory() { return emulator::memories[emulator::block()].bytes; }
inline void wait_for_predecessor() {}
inline void let_successor_start() {}
