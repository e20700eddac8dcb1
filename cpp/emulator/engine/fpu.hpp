// SPDX-License-Identifier: Apache-2.0
// The matrix unit's arithmetic: products of cut mantissas, summed in integers by groups of eight, rounded
// into DST.
//
// Source registers hold sign, 8 bits of exponent and 10 of mantissa. A product multiplies 5 bits of A with 7
// of B; which ones, the fidelity phase says (1: A's low bits, 2: B's low bits), and each phase is added to
// DST on its own. ttsim, which is bit-exact to silicon, was read for the widths and the roundings.
#pragma once

#include "tiles.hpp"

namespace emulator {

// dst += x * y for one tile each: x through register B, y through register A, in `phases` fidelity phases.
void fpu_multiply(const Tile& x, const Tile& y, Tile& dst, int phases, bool fp32_dst);

// One value at a time: dst += a * b; dst = a + b or a - b, added to what is there if `accumulate`.
void fpu_multiply_values(const Tile& a, const Tile& b, Tile& dst, int phases, bool fp32_dst);
void fpu_add_values(const Tile& a, const Tile& b, Tile& dst, bool subtract, bool accumulate, bool fp32_dst);

}  // namespace emulator
