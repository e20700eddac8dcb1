// SPDX-License-Identifier: Apache-2.0
#include "fpu.hpp"

#include <algorithm>
#include <utility>

namespace emulator {
namespace {

using Lane = std::int32_t;

// A value of a source register, taken apart. Zero and subnormal numbers have mantissa 0.
struct Parts {
    Lane sign;  // 0 or -1
    Lane exponent;
    Lane mantissa;  // 11 bits
};

inline Parts take_apart(float value) {
    const std::uint32_t bits = bits_of(value);
    const Lane exponent = static_cast<Lane>(bits >> 23 & 255);
    return {-static_cast<Lane>(bits >> 31), exponent,
            exponent == 0 ? 0 : static_cast<Lane>((bits >> 13 & 0x3FF) | 0x400)};
}

inline Lane a_bits(Lane mantissa, int phase) { return (phase & 1) != 0 ? mantissa >> 1 & 31 : mantissa >> 6; }
inline Lane b_bits(Lane mantissa, int phase) {
    return (phase & 2) != 0 ? (mantissa & 15) << 3 : mantissa >> 4;
}
inline Lane bias(int phase) { return -127 - ((phase & 1) != 0 ? 5 : 0) - ((phase & 2) != 0 ? 7 : 0); }

// Shift a magnitude right, halves up (for negative terms: down).
inline Lane shifted(Lane magnitude, Lane by, Lane sign) {
    const Lane step = by > 0 && by < 31 ? 1 << (by - 1 & 31) : 0;
    const Lane down = (magnitude + step + (by > 0 ? sign : 0)) >> (by & 31);
    return by >= 31 ? 0 : down;
}

// Two sums with 23 bits behind the point and the exponents given, added to dst: the value of dst afterwards.
inline float accumulate(Lane sum0, Lane exponent0, Lane sum1, Lane exponent1, float dst, bool fp32) {
    const std::uint32_t bits = bits_of(dst);
    const Lane exponent_dst = static_cast<Lane>(bits >> 23 & 255);
    const Lane sign_dst = -static_cast<Lane>(bits >> 31);
    Lane held = exponent_dst == 0 ? 0 : static_cast<Lane>((bits & 0x7FFFFF) | 0x800000);
    const Lane sign0 = sum0 >> 31, sign1 = sum1 >> 31;
    Lane top = std::max(std::max(exponent0, exponent1), exponent_dst);
    Lane one = shifted((sum0 ^ sign0) - sign0, top - exponent0, sign0);
    Lane two = shifted((sum1 ^ sign1) - sign1, top - exponent1, sign1);
    held = shifted(held, top - exponent_dst, 0);
    if (!fp32) {  // 10 bits behind the point are added
        one = (one + (1 << 12) + sign0) & ~0x1FFF;
        two = (two + (1 << 12) + sign1) & ~0x1FFF;
        held = (held + (1 << 12)) & ~0x1FFF;
    }
    const Lane sum = ((one ^ sign0) - sign0) + ((two ^ sign1) - sign1) + ((held ^ sign_dst) - sign_dst);
    const Lane sign = sum >> 31;
    Lane magnitude = (sum ^ sign) - sign;
    if (magnitude == 0 || top <= 0) {
        return 0.0f;
    }
    // To 24 bits, or 8 for bf16, halves away from zero.
    const Lane excess =
        24 - static_cast<Lane>(__builtin_clz(static_cast<std::uint32_t>(magnitude)));  // bits above 8
    top += excess - 16;
    const Lane drop = fp32 ? excess - 16 : excess;
    if (drop > 0) {
        magnitude = (magnitude + (1 << (drop - 1))) >> drop;
    } else {
        magnitude <<= -drop;
    }
    magnitude <<= fp32 ? 0 : 16;
    top += magnitude >> 24 & 1;
    const std::uint32_t negative = static_cast<std::uint32_t>(sign) & 0x80000000u;
    if (top <= 0) {
        return 0.0f;
    }
    if (top >= 255) {
        return float_of(negative | 0x7F800000u);
    }
    return float_of(negative | static_cast<std::uint32_t>(top) << 23 |
                    (static_cast<std::uint32_t>(magnitude) & 0x7FFFFF));
}

struct Matrix {
    Lane sign[32][32], exponent[32][32], mantissa[32][32];
};

void take_apart(const Tile& tile, Matrix& into) {
    for (int r = 0; r < 32; ++r) {
        for (int c = 0; c < 32; ++c) {
            const Parts parts = take_apart(tile.at[r][c]);
            into.sign[r][c] = parts.sign;
            into.exponent[r][c] = parts.exponent;
            into.mantissa[r][c] = parts.mantissa;
        }
    }
}

// Products of eight k of one row of x with all columns of y, aligned to the largest exponent and added.
inline void sum_of_eight(const Matrix& x, const Matrix& y, const Lane (&y_part)[32][32], int m, int k0,
                         int phase, Lane* sums, Lane* exponents) {
    alignas(64) Lane top[32], exponent[8][32];
    for (int n = 0; n < 32; ++n) {
        top[n] = -1000;
    }
    const Lane add = bias(phase);
    const Lane zero = std::max(add, 0);
    for (int i = 0; i < 8; ++i) {
        const Lane e = x.exponent[m][k0 + i] + add;
        const bool none = x.mantissa[m][k0 + i] == 0;
        for (int n = 0; n < 32; ++n) {
            const Lane both = none || y.mantissa[k0 + i][n] == 0 ? zero : e + y.exponent[k0 + i][n];
            exponent[i][n] = both;
            top[n] = std::max(top[n], both);
        }
    }
    for (int n = 0; n < 32; ++n) {
        sums[n] = 0;
    }
    for (int i = 0; i < 8; ++i) {
        const Lane left = b_bits(x.mantissa[m][k0 + i], phase), sign = x.sign[m][k0 + i];
        if (left == 0) {
            continue;
        }
        for (int n = 0; n < 32; ++n) {
            const Lane by = std::min(top[n] - exponent[i][n], 29);
            const Lane product = left * y_part[k0 + i][n];
            const Lane kept = ((product << 1) + (1 << by)) >> (by + 1);
            const Lane flip = sign ^ y.sign[k0 + i][n];
            sums[n] += (kept ^ flip) - flip;
        }
    }
    for (int n = 0; n < 32; ++n) {
        const bool none = top[n] <= 0;
        sums[n] = none ? 0 : sums[n] * 8192;
        exponents[n] = none ? 0 : top[n];
    }
}

}  // namespace

void fpu_multiply(const Tile& x, const Tile& y, Tile& dst, int phases, bool fp32_dst) {
    static Matrix left, right;
    static Lane part[32][32];
    take_apart(x, left);
    take_apart(y, right);
    for (int phase = 0; phase < phases; ++phase) {
        for (int half = 0; half < 2; ++half) {
            for (int k = half * 16; k < half * 16 + 16; ++k) {
                for (int n = 0; n < 32; ++n) {
                    part[k][n] = a_bits(right.mantissa[k][n], phase);
                }
            }
            for (int m = 0; m < 32; ++m) {
                alignas(64) Lane sums[2][32], exponents[2][32];
                sum_of_eight(left, right, part, m, half * 16, phase, sums[0], exponents[0]);
                sum_of_eight(left, right, part, m, half * 16 + 8, phase, sums[1], exponents[1]);
                for (int n = 0; n < 32; ++n) {
                    dst.at[m][n] = accumulate(sums[0][n], exponents[0][n], sums[1][n], exponents[1][n],
                                              dst.at[m][n], fp32_dst);
                }
            }
        }
    }
}

void fpu_multiply_values(const Tile& a, const Tile& b, Tile& dst, int phases, bool fp32_dst) {
    for (int i = 0; i < 1024; ++i) {
        const Parts p = take_apart((&a.at[0][0])[i]), q = take_apart((&b.at[0][0])[i]);
        float& into = (&dst.at[0][0])[i];
        for (int phase = 0; phase < phases; ++phase) {
            const Lane exponent = p.exponent + q.exponent + bias(phase), flip = p.sign ^ q.sign;
            const Lane product = a_bits(p.mantissa, phase) * b_bits(q.mantissa, phase) * 8192;
            const bool none = p.mantissa == 0 || q.mantissa == 0 || exponent <= 0;
            into = accumulate(none ? 0 : (product ^ flip) - flip, none ? 0 : exponent, 0, 0, into, fp32_dst);
        }
    }
}

void fpu_add_values(const Tile& a, const Tile& b, Tile& dst, bool subtract, bool keep, bool fp32_dst) {
    for (int i = 0; i < 1024; ++i) {
        Parts p = take_apart((&a.at[0][0])[i]), q = take_apart((&b.at[0][0])[i]);
        if (subtract) {
            q.sign = ~q.sign;
        }
        if (p.mantissa == 0) {
            p = {0, 0, 0};
        }
        if (q.mantissa == 0) {
            q = {0, 0, 0};
        }
        if (p.exponent < q.exponent || (p.exponent == q.exponent && p.mantissa < q.mantissa)) {
            std::swap(p, q);
        }
        const Lane by = p.exponent - q.exponent;
        const Lane small = by == 0 ? q.mantissa : by < 12 ? (q.mantissa + (1 << (by - 1))) >> by : 0;
        const Lane sum = (p.sign == q.sign ? p.mantissa + small : p.mantissa - small) * 8192;
        float& into = (&dst.at[0][0])[i];
        into = accumulate((sum ^ p.sign) - p.sign, p.exponent, 0, 0, keep ? into : 0.0f, fp32_dst);
    }
}

}  // namespace emulator
