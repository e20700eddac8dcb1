// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common.h"

inline void add_binary_tile_init(EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_init(emulator::SFPU_BINARY | emulator::ADD << 8);
}
template <auto... options>
inline void add_binary_tile(std::uint32_t dst0, std::uint32_t dst1, std::uint32_t out, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_binary(emulator::ADD, dst0, dst1, out);
}
inline void sub_binary_tile_init(EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_init(emulator::SFPU_BINARY | emulator::SUB << 8);
}
template <auto... options>
inline void sub_binary_tile(std::uint32_t dst0, std::uint32_t dst1, std::uint32_t out, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_binary(emulator::SUB, dst0, dst1, out);
}
inline void mul_binary_tile_init(EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_init(emulator::SFPU_BINARY | emulator::MUL << 8);
}
template <auto... options>
inline void mul_binary_tile(std::uint32_t dst0, std::uint32_t dst1, std::uint32_t out, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_binary(emulator::MUL, dst0, dst1, out);
}
inline void div_binary_tile_init(EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_init(emulator::SFPU_BINARY | emulator::DIV << 8);
}
template <auto... options>
inline void div_binary_tile(std::uint32_t dst0, std::uint32_t dst1, std::uint32_t out, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_binary(emulator::DIV, dst0, dst1, out);
}
inline void rsub_binary_tile_init(EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_init(emulator::SFPU_BINARY | emulator::RSUB << 8);
}
template <auto... options>
inline void rsub_binary_tile(std::uint32_t dst0, std::uint32_t dst1, std::uint32_t out, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_binary(emulator::RSUB, dst0, dst1, out);
}
