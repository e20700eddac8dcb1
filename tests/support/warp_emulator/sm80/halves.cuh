// SPDX-License-Identifier: Apache-2.0
// In place of gpu_kernels/cuda/sm80/halves.cuh; fragments as in mma.cuh.
#pragma once

#include "common/element.cuh"

inline float fp16_of(u16 bits) {
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return static_cast<float>(value);
}

inline u32 pack_fp16(float first, float second) {
    const _Float16 both[2] = {static_cast<_Float16>(first), static_cast<_Float16>(second)};
    u32 word;
    std::memcpy(&word, both, 4);
    return word;
}

inline float first_of_fp16(u32 word) { return fp16_of(word & 0xffff); }
inline float second_of_fp16(u32 word) { return fp16_of(word >> 16); }

inline u32 first_in_both(u32 word) { return (word & 0xffff) * 0x10001u; }
inline u32 second_in_both(u32 word) { return (word >> 16) * 0x10001u; }

inline u32 multiply_fp16x2(u32 a, u32 b) {
    return pack_fp16(first_of_fp16(a) * first_of_fp16(b), second_of_fp16(a) * second_of_fp16(b));
}
inline u32 multiply_add_fp16x2(u32 a, u32 b, u32 c) {
    return pack_fp16(first_of_fp16(a) * first_of_fp16(b) + first_of_fp16(c),
                     second_of_fp16(a) * second_of_fp16(b) + second_of_fp16(c));
}

inline void multiply_add_fp16(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const int me = emulator::current, lane = me % 32, first = me - lane;
    const auto words = [](int fiber) { return emulator::fibers[fiber].words; };
    for (int i = 0; i < 4; ++i) words(me)[i] = a[i];
    words(me)[4] = b0;
    words(me)[5] = b1;
    emulator::meet_warp();
    const auto half = [](u32 word, int k) { return fp16_of(word >> (k % 2 * 16) & 0xffff); };
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const int of_pair = k % 8 / 2;
            sums[i] += half(words(first + row % 8 * 4 + of_pair)[row / 8 + k / 8 * 2], k) *
                       half(words(first + column * 4 + of_pair)[4 + k / 8], k);
        }
    }
    emulator::meet_warp();
}

inline float power_of_two(float x) { return std::exp2(x); }
inline float logarithm_to_two(float x) { return std::log2(x); }
inline float inverse_of(float x) { return 1.0f / x; }
