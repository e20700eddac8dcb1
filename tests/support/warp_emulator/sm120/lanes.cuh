// SPDX-License-Identifier: Apache-2.0
// In place of gpu_kernels/cuda/sm120/lanes.cuh: one exchange of all words, since a shuffle costs a fiber
// switch.
#pragma once

#include "common/element.cuh"

#define OUT_OF_LINE inline

template <int WORDS>
struct Lanes {
    u32 own[WORDS];

    void bring() const {
        auto& mine = emulator::fibers[emulator::current].words;
        for (u64& word : mine) word = 0;
        for (int i = 0; i < WORDS; ++i) mine[i / 2] |= static_cast<u64>(own[i]) << 32 * (i % 2);
        emulator::meet_warp();
    }
    u32 of(int lane, int word) const {
        const int first = emulator::current / 32 * 32;
        return emulator::fibers[first + lane].words[word / 2] >> 32 * (word % 2);
    }
    void leave() const { emulator::meet_warp(); }
};

inline u32 load_two_bytes(u32 row, int offset) {
    u16 bytes;
    std::memcpy(&bytes, emulator::shared(row) + offset, 2);
    return bytes;
}
