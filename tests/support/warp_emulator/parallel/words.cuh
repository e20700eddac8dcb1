// SPDX-License-Identifier: Apache-2.0
// In place of gpu_kernels/cuda/parallel/words.cuh. A look at the clock takes a second.
#pragma once

#include "common/element.cuh"

constexpr u32 PATIENCE = 1;

inline void store_words(u64 to, u64 first, u64 second) {
    u64* at = reinterpret_cast<u64*>(to);
    at[0] = first;
    at[1] = second;
    ++emulator::events;
}

inline void load_words(u64 from, u64 (&words)[2]) {
    std::memcpy(words, reinterpret_cast<const void*>(from), sizeof words);
}

inline u32 load_flag(u64 from) { return *reinterpret_cast<const u32*>(from); }

inline void store_flag(u64 to, u32 word) { *reinterpret_cast<u32*>(to) = word; }

inline uint4 load_put(u64 from) { return *reinterpret_cast<const uint4*>(from); }

inline void store_put(u64 to, uint4 words) { *reinterpret_cast<uint4*>(to) = words; }

inline u64 load_word(const u64* from) { return *from; }

inline void store_word(u64* to, u64 word) { *to = word; }

inline u64 store_first(u64* to, u64 word) {
    const u64 was = *to;
    if (!was) *to = word;
    return was;
}

inline u64 nanoseconds() {
    static u64 now = 0;
    return now += 1000000000;
}
