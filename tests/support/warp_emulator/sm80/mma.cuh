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
    const auto half = [](u32 word, int k) { return value_of(word >> (k % 2 * 16) & 0xffff); };
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
