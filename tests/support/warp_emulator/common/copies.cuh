// SPDX-License-Identifier: Apache-2.0
// In place of gpu_kernels/cuda/common/copies.cuh.
#pragma once

#include "common/element.cuh"

inline u32 shared_address(const void* pointer) {
    return static_cast<const unsigned char*>(pointer) - dynamic_memory();
}

inline u64 row_at(u64 first, u32 row, u32 bytes) { return first + static_cast<u64>(row) * bytes; }

inline u64 evict_first() { return 0; }

inline void copy_16(u32 to, const void* from, u64 = 0) {
    if (reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("16 bytes of global memory begin between");
    if (!emulator::late) emulator::land({to, from});
    emulator::fibers[emulator::current].open.push_back({to, from});
}

inline void copy_16_or_zeros(u32 to, const void* from, bool valid, u64 = 0) {
    alignas(16) static const unsigned char zeros[16] = {};
    copy_16(to, valid ? from : zeros);
}

inline void copy_16_if(bool on, u32 to, const void* from) {
    if (on) copy_16(to, from);
}

// The first `valid` of four bytes, then zeros.
inline void copy_4(u32 to, const void* from, int valid = 4) {
    if (reinterpret_cast<uintptr_t>(from) % 4) emulator::fail("4 bytes of global memory begin between");
    emulator::Copy one{to, from, valid, 4 - valid};
    if (!emulator::late) emulator::land(one);
    emulator::fibers[emulator::current].open.push_back(one);
}

inline void copy_unaligned_4(u32 to, u64 from, int bytes) {
    const int skipped = from % 4, end = std::max(skipped + bytes, 0);
    const auto* word = reinterpret_cast<const unsigned char*>(from - skipped);
    copy_4(to, word, std::min(end, 4));
    if (end > 4) copy_4(to + 4, word + 4, end - 4);
}

inline void copies_commit() {
    auto& fiber = emulator::fibers[emulator::current];
    fiber.groups.push_back(std::move(fiber.open));
    fiber.open.clear();
}

template <int LEFT>
inline void copies_wait() {
    auto& groups = emulator::fibers[emulator::current].groups;
    for (; static_cast<int>(groups.size()) > LEFT; groups.pop_front())
        if (emulator::late)
            for (const auto& copy : groups.front()) emulator::land(copy);
}

template <bool = false>
inline uint4 load_once(const uint4* from) { return *from; }

inline uint4 load_there(const uint4* from) { return *from; }

inline uint2 load_once_8(const void* from) { return *static_cast<const uint2*>(from); }

inline uint4 load_16(u32 from) {
    uint4 words;
    std::memcpy(&words, emulator::shared(from), 16);
    return words;
}
inline uint2 load_8(u32 from) {
    uint2 words;
    std::memcpy(&words, emulator::shared(from / 16 * 16) + from % 16, 8);
    return words;
}

// As it may be at its worst: the line is lost at once.
inline void discard_line(const u16* line, float) {
    if (reinterpret_cast<uintptr_t>(line) % 128) emulator::fail("a line begins between");
    std::memset(const_cast<u16*>(line), 0xff, 128);
}
