// SPDX-License-Identifier: Apache-2.0
// In place of gpu_kernels/cuda/sm80/mma.cuh; fragments as the PTX ISA draws them (ldmatrix; mma.m16n8k16 with
// 16-bit A and B; movmatrix).
#pragma once

#include "common/element.cuh"

inline void load_matrices(u32 (&words)[4], u32 address) {
    const int me = emulator::current, lane = me % 32;
    emulator::fibers[me].words[0] = address;
    emulator::meet_warp();
    for (int m = 0; m < 4; ++m) {
        const u32 row = emulator::fibers[me - lane + 8 * m + lane / 4].words[0];
        std::memcpy(&words[m], emulator::shared(row) + lane % 4 * 4, 4);
    }
    emulator::meet_warp();
}

inline void multiply_add(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const int me = emulator::current, lane = me % 32, first = me - lane;
    const auto words = [](int fiber) { return emulator::fibers[fiber].words; };
    for (int i = 0; i < 4; ++i) words(me)[i] = a[i];
    words(me)[4] = b0;
    words(me)[5] = b1;
    emulator::meet_warp();
    float left[2][16], right[2][16];  // of a thread's two rows and of its two columns
    for (int i = 0; i < 2; ++i)
        for (int pair = 0; pair < 8; ++pair) {
            const u32 of_a = words(first + lane / 4 * 4 + pair % 4)[i + pair / 4 * 2];
            const u32 of_b = words(first + (lane % 4 * 2 + i) * 4 + pair % 4)[4 + pair / 4];
            for (int high = 0; high < 2; ++high) {
                left[i][2 * pair + high] = value_of(of_a >> (16 * high) & 0xffff);
                right[i][2 * pair + high] = value_of(of_b >> (16 * high) & 0xffff);
            }
        }
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k) sums[i] += left[i / 2][k] * right[i % 2][k];
    emulator::meet_warp();
}

inline u32 transposed(u32 word) {
    const int me = emulator::current, lane = me % 32;
    emulator::fibers[me].words[0] = word;
    emulator::meet_warp();
    u32 out = 0;
    for (int i = 0; i < 2; ++i) {  // element (row, column + i) was (column + i, row)
        const int row = lane / 4, column = lane % 4 * 2 + i;
        const u32 from = emulator::fibers[me - lane + column * 4 + row / 2].words[0];
        out |= (from >> (row % 2 * 16) & 0xffff) << (16 * i);
    }
    emulator::meet_warp();
    return out;
}
