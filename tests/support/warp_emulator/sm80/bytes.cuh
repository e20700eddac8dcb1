// SPDX-License-Identifier: Apache-2.0
// In place of gpu_kernels/cuda/sm80/bytes.cuh.
#pragma once

#include "common/element.cuh"

inline u32 select_bytes(u32 low, u32 high, u32 selector) {
    const u64 both = static_cast<u64>(high) << 32 | low;
    u32 out = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 which = selector >> 4 * i & 15, byte = both >> 8 * (which & 7) & 0xff;
        out |= (which & 8 ? byte >> 7 ? 0xffu : 0u : byte) << 8 * i;
    }
    return out;
}

inline u32 select_bits(u32 set, u32 clear, u32 mask) { return (set & mask) | (clear & ~mask); }

inline u32 select_or_flip(u32 set, u32 flip, u32 mask) { return (set & mask) | (~flip & ~mask); }

inline u32 and_or(u32 word, u32 mask, u32 bits) { return (word & mask) | bits; }

inline u32 rotated(u32 word, u32 bits) { return word << bits | word >> (32 - bits); }

inline u32 flip_or_select(u32 flip, u32 keep, u32 mask) { return (~flip & mask) | (keep & ~mask); }
