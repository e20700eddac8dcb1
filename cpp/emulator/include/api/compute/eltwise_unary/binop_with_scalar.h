// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common.h"

inline void binop_with_scalar_tile_init(EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_init(emulator::SFPU_SCALAR);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void add_unary_tile(std::uint32_t dst, std::uint32_t value, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_unary(emulator::SFPU_ADD_SCALAR, dst, value);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void sub_unary_tile(std::uint32_t dst, std::uint32_t value, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_unary(emulator::SFPU_SUB_SCALAR, dst, value);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void mul_unary_tile(std::uint32_t dst, std::uint32_t value, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_unary(emulator::SFPU_MUL_SCALAR, dst, value);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void div_unary_tile(std::uint32_t dst, std::uint32_t value, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_unary(emulator::SFPU_DIV_SCALAR, dst, value);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void rsub_unary_tile(std::uint32_t dst, std::uint32_t value, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_unary(emulator::SFPU_RSUB_SCALAR, dst, value);
}
