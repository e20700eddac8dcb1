// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common.h"

template <BroadcastType how, bool fp32 = DST_ACCUM_MODE>
inline void unary_bcast_init(std::uint32_t icb, EMU_PLACE) {
    EMU_HERE;
    emu_broadcast_init(static_cast<std::uint32_t>(how), icb);
}
template <BroadcastType how, bool fp32 = DST_ACCUM_MODE>
inline void unary_bcast(std::uint32_t icb, std::uint32_t tile, std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_broadcast(static_cast<std::uint32_t>(how), icb, tile, dst);
}
template <BroadcastType how>
inline void unary_bcast_uninit(std::uint32_t icb, EMU_PLACE) {
    EMU_HERE;
    emu_broadcast_uninit(icb);
}
inline void add_bcast_cols_init(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_binary_init(emulator::ADD, emulator::COLUMN, icb0, icb1, 0);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void add_tiles_bcast_cols(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t tile0,
                                 std::uint32_t tile1, std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_binary(emulator::ADD, emulator::COLUMN, icb0, icb1, tile0, tile1, dst, 0);
}
inline void add_bcast_rows_init(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_binary_init(emulator::ADD, emulator::ROW, icb0, icb1, 0);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void add_tiles_bcast_rows(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t tile0,
                                 std::uint32_t tile1, std::uint32_t dst, std::uint32_t row = 0, EMU_PLACE) {
    EMU_HERE;
    emu_binary(emulator::ADD, emulator::ROW, icb0, icb1, tile0, tile1, dst, row);
}
inline void add_bcast_scalar_init(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_binary_init(emulator::ADD, emulator::SCALAR, icb0, icb1, 0);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void add_tiles_bcast_scalar(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t tile0,
                                   std::uint32_t tile1, std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_binary(emulator::ADD, emulator::SCALAR, icb0, icb1, tile0, tile1, dst, 0);
}
template <BroadcastType how, bool fp32 = DST_ACCUM_MODE>
inline void add_tiles_bcast(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t tile0, std::uint32_t tile1,
                            std::uint32_t dst, std::uint32_t row = 0, EMU_PLACE) {
    EMU_HERE;
    emu_binary(emulator::ADD, static_cast<std::uint32_t>(how), icb0, icb1, tile0, tile1, dst, row);
}
inline void sub_bcast_cols_init(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_binary_init(emulator::SUB, emulator::COLUMN, icb0, icb1, 0);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void sub_tiles_bcast_cols(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t tile0,
                                 std::uint32_t tile1, std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_binary(emulator::SUB, emulator::COLUMN, icb0, icb1, tile0, tile1, dst, 0);
}
inline void sub_bcast_rows_init(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_binary_init(emulator::SUB, emulator::ROW, icb0, icb1, 0);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void sub_tiles_bcast_rows(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t tile0,
                                 std::uint32_t tile1, std::uint32_t dst, std::uint32_t row = 0, EMU_PLACE) {
    EMU_HERE;
    emu_binary(emulator::SUB, emulator::ROW, icb0, icb1, tile0, tile1, dst, row);
}
inline void sub_bcast_scalar_init(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_binary_init(emulator::SUB, emulator::SCALAR, icb0, icb1, 0);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void sub_tiles_bcast_scalar(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t tile0,
                                   std::uint32_t tile1, std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_binary(emulator::SUB, emulator::SCALAR, icb0, icb1, tile0, tile1, dst, 0);
}
template <BroadcastType how, bool fp32 = DST_ACCUM_MODE>
inline void sub_tiles_bcast(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t tile0, std::uint32_t tile1,
                            std::uint32_t dst, std::uint32_t row = 0, EMU_PLACE) {
    EMU_HERE;
    emu_binary(emulator::SUB, static_cast<std::uint32_t>(how), icb0, icb1, tile0, tile1, dst, row);
}
inline void mul_bcast_cols_init(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_binary_init(emulator::MUL, emulator::COLUMN, icb0, icb1, 0);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void mul_tiles_bcast_cols(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t tile0,
                                 std::uint32_t tile1, std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_binary(emulator::MUL, emulator::COLUMN, icb0, icb1, tile0, tile1, dst, 0);
}
inline void mul_bcast_rows_init(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_binary_init(emulator::MUL, emulator::ROW, icb0, icb1, 0);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void mul_tiles_bcast_rows(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t tile0,
                                 std::uint32_t tile1, std::uint32_t dst, std::uint32_t row = 0, EMU_PLACE) {
    EMU_HERE;
    emu_binary(emulator::MUL, emulator::ROW, icb0, icb1, tile0, tile1, dst, row);
}
inline void mul_bcast_scalar_init(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_binary_init(emulator::MUL, emulator::SCALAR, icb0, icb1, 0);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void mul_tiles_bcast_scalar(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t tile0,
                                   std::uint32_t tile1, std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_binary(emulator::MUL, emulator::SCALAR, icb0, icb1, tile0, tile1, dst, 0);
}
template <BroadcastType how, bool fp32 = DST_ACCUM_MODE>
inline void mul_tiles_bcast(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t tile0, std::uint32_t tile1,
                            std::uint32_t dst, std::uint32_t row = 0, EMU_PLACE) {
    EMU_HERE;
    emu_binary(emulator::MUL, static_cast<std::uint32_t>(how), icb0, icb1, tile0, tile1, dst, row);
}
template <EltwiseBinaryType op, BroadcastType how>
inline void bcast_init(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_binary_init(static_cast<std::uint32_t>(op), static_cast<std::uint32_t>(how), icb0, icb1, 0);
}
