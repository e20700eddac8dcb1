// SPDX-License-Identifier: Apache-2.0
// fp32 arithmetic on bit patterns, for RISC-V cores without a floating-point unit. Rounds to nearest, ties to
// even.
#pragma once

#include <cstdint>

namespace moe {

constexpr uint32_t kFp32Sign = 0x80000000u;
constexpr uint32_t kFp32Infinity = 0x7f800000u;
constexpr uint32_t kFp32Nan = 0x7fc00000u;

// a + b, subnormal numbers included.
inline uint32_t fp32_add(uint32_t a, uint32_t b) {
    if ((a & ~kFp32Sign) < (b & ~kFp32Sign)) {
        const uint32_t swapped = a;
        a = b;
        b = swapped;
    }
    const uint32_t big = a & ~kFp32Sign;
    const uint32_t small = b & ~kFp32Sign;
    if (big >= kFp32Infinity) {
        const bool undefined = big > kFp32Infinity || (small == kFp32Infinity && a != b);
        return undefined ? kFp32Nan : a;
    }
    // three more bits below the mantissa: two to round with, one that keeps whether anything lies below
    int32_t exponent = big >> 23 != 0 ? static_cast<int32_t>(big >> 23) : 1;
    const int32_t other = small >> 23 != 0 ? static_cast<int32_t>(small >> 23) : 1;
    uint32_t x = ((big & 0x7fffffu) | (big >> 23 != 0 ? 0x800000u : 0)) << 3;
    uint32_t y = ((small & 0x7fffffu) | (small >> 23 != 0 ? 0x800000u : 0)) << 3;
    const int32_t shift = exponent - other;
    if (shift >= 27) {
        y = y != 0 ? 1 : 0;
    } else if (shift != 0) {
        y = (y >> shift) | ((y & ((1u << shift) - 1)) != 0 ? 1 : 0);
    }
    x = ((a ^ b) & kFp32Sign) != 0 ? x - y : x + y;
    if (x == 0) {
        return a & b & kFp32Sign;
    }
    if (x >= 1u << 27) {
        x = (x >> 1) | (x & 1);
        exponent++;
    }
    while (x < 1u << 26 && exponent > 1) {
        x <<= 1;
        exponent--;
    }
    const uint32_t low = x & 7;
    x >>= 3;
    x += low > 4 || (low == 4 && (x & 1) != 0) ? 1 : 0;
    if (x >= 1u << 24) {
        x >>= 1;
        exponent++;
    }
    if (exponent >= 255) {
        return (a & kFp32Sign) | kFp32Infinity;
    }
    const uint32_t biased = x >= 0x800000u ? static_cast<uint32_t>(exponent) : 0;
    return (a & kFp32Sign) | (biased << 23) | (x & 0x7fffffu);
}

// Rounded to bf16. NaN stays NaN.
inline uint16_t bf16_of_fp32(uint32_t a) {
    if ((a & ~kFp32Sign) > kFp32Infinity) {
        return static_cast<uint16_t>((a >> 16) | 0x40u);
    }
    return static_cast<uint16_t>((a + 0x7fffu + ((a >> 16) & 1)) >> 16);
}

}  // namespace moe
