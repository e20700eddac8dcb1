// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common.h"

inline void add_init(std::uint32_t icb0, std::uint32_t icb1, bool accumulate = false, std::uint32_t = 0,
                     EMU_PLACE) {
    EMU_HERE;
    emu_binary_init(emulator::ADD, emulator::NO_BROADCAST, icb0, icb1, accumulate ? 1 : 0);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void add_tiles(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t tile0, std::uint32_t tile1,
                      std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_binary(emulator::ADD, emulator::NO_BROADCAST, icb0, icb1, tile0, tile1, dst, 0);
}
template <EltwiseBinaryReuseDestType reuse>
inline void add_reuse_dest_init(std::uint32_t icb, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_reuse_init(emulator::ADD, reuse == EltwiseBinaryReuseDestType::DEST_TO_SRCB ? 1 : 0, icb);
}
template <EltwiseBinaryReuseDestType reuse, bool fp32 = DST_ACCUM_MODE>
inline void add_reuse_dest_tiles(std::uint32_t icb, std::uint32_t tile, std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_binary_reuse(emulator::ADD, reuse == EltwiseBinaryReuseDestType::DEST_TO_SRCB ? 1 : 0, icb, tile,
                     dst);
}
inline void sub_init(std::uint32_t icb0, std::uint32_t icb1, bool accumulate = false, std::uint32_t = 0,
                     EMU_PLACE) {
    EMU_HERE;
    emu_binary_init(emulator::SUB, emulator::NO_BROADCAST, icb0, icb1, accumulate ? 1 : 0);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void sub_tiles(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t tile0, std::uint32_t tile1,
                      std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_binary(emulator::SUB, emulator::NO_BROADCAST, icb0, icb1, tile0, tile1, dst, 0);
}
template <EltwiseBinaryReuseDestType reuse>
inline void sub_reuse_dest_init(std::uint32_t icb, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_reuse_init(emulator::SUB, reuse == EltwiseBinaryReuseDestType::DEST_TO_SRCB ? 1 : 0, icb);
}
template <EltwiseBinaryReuseDestType reuse, bool fp32 = DST_ACCUM_MODE>
inline void sub_reuse_dest_tiles(std::uint32_t icb, std::uint32_t tile, std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_binary_reuse(emulator::SUB, reuse == EltwiseBinaryReuseDestType::DEST_TO_SRCB ? 1 : 0, icb, tile,
                     dst);
}
inline void mul_init(std::uint32_t icb0, std::uint32_t icb1, bool accumulate = true, std::uint32_t = 0,
                     EMU_PLACE) {
    EMU_HERE;
    emu_binary_init(emulator::MUL, emulator::NO_BROADCAST, icb0, icb1, accumulate ? 1 : 0);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void mul_tiles(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t tile0, std::uint32_t tile1,
                      std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_binary(emulator::MUL, emulator::NO_BROADCAST, icb0, icb1, tile0, tile1, dst, 0);
}
template <EltwiseBinaryReuseDestType reuse>
inline void mul_reuse_dest_init(std::uint32_t icb, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_reuse_init(emulator::MUL, reuse == EltwiseBinaryReuseDestType::DEST_TO_SRCB ? 1 : 0, icb);
}
template <EltwiseBinaryReuseDestType reuse, bool fp32 = DST_ACCUM_MODE>
inline void mul_reuse_dest_tiles(std::uint32_t icb, std::uint32_t tile, std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_binary_reuse(emulator::MUL, reuse == EltwiseBinaryReuseDestType::DEST_TO_SRCB ? 1 : 0, icb, tile,
                     dst);
}
