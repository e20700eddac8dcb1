// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common.h"

inline void silu_tile_init(EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_init(emulator::SFPU_SILU);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void silu_tile(std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_unary(emulator::SFPU_SILU, dst, 0);
}
template <bool approximate = false>
inline void sigmoid_tile_init(EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_init(emulator::SFPU_SIGMOID);
}
template <VectorMode mode = VectorMode::RC, bool approximate = false, bool fp32 = DST_ACCUM_MODE>
inline void sigmoid_tile(std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_unary(emulator::SFPU_SIGMOID, dst, 0);
}
template <bool approximate = false, bool fp32 = DST_ACCUM_MODE>
inline void tanh_tile_init(EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_init(emulator::SFPU_TANH);
}
template <bool approximate = false, bool fp32 = DST_ACCUM_MODE>
inline void tanh_tile(std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_unary(emulator::SFPU_TANH, dst, 0);
}
template <bool approximate = false, bool fp32 = DST_ACCUM_MODE>
inline void log_tile_init(EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_init(emulator::SFPU_LOG);
}
template <bool approximate = false, bool fp32 = DST_ACCUM_MODE>
inline void log_tile(std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_unary(emulator::SFPU_LOG, dst, 0);
}
inline void square_tile_init(EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_init(emulator::SFPU_SQUARE);
}
inline void square_tile(std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_unary(emulator::SFPU_SQUARE, dst, 0);
}
inline void abs_tile_init(EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_init(emulator::SFPU_ABS);
}
inline void abs_tile(std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_unary(emulator::SFPU_ABS, dst, 0);
}
