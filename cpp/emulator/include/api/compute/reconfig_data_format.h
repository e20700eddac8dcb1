// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common_globals.h"

template <SrcOrder order = SrcOrder::Regular>
inline void reconfig_data_format(std::uint32_t icb0, std::uint32_t icb1, EMU_PLACE) {
    EMU_HERE;
    constexpr bool reverse = order == SrcOrder::Reverse;
    emu_reconfig(emulator::UNPACK_A, reverse ? icb1 : icb0);
    emu_reconfig(emulator::UNPACK_B, reverse ? icb0 : icb1);
}
template <SrcOrder order = SrcOrder::Regular>
inline void reconfig_data_format(std::uint32_t old0, std::uint32_t icb0, std::uint32_t old1,
                                 std::uint32_t icb1, EMU_PLACE) {
    EMU_HERE;
    constexpr bool reverse = order == SrcOrder::Reverse;
    emu_reconfig_from(emulator::UNPACK_A, reverse ? old1 : old0, reverse ? icb1 : icb0);
    emu_reconfig_from(emulator::UNPACK_B, reverse ? old0 : old1, reverse ? icb0 : icb1);
}
inline void reconfig_data_format_srca(std::uint32_t cb, EMU_PLACE) {
    EMU_HERE;
    emu_reconfig(emulator::UNPACK_A, cb);
}
inline void reconfig_data_format_srca(std::uint32_t old, std::uint32_t cb, EMU_PLACE) {
    EMU_HERE;
    emu_reconfig_from(emulator::UNPACK_A, old, cb);
}
inline void reconfig_data_format_srcb(std::uint32_t cb, EMU_PLACE) {
    EMU_HERE;
    emu_reconfig(emulator::UNPACK_B, cb);
}
inline void reconfig_data_format_srcb(std::uint32_t old, std::uint32_t cb, EMU_PLACE) {
    EMU_HERE;
    emu_reconfig_from(emulator::UNPACK_B, old, cb);
}
template <bool tile_dim = false>
inline void pack_reconfig_data_format(std::uint32_t cb, EMU_PLACE) {
    EMU_HERE;
    emu_reconfig(emulator::PACKER, cb);
}
template <bool tile_dim = false>
inline void pack_reconfig_data_format(std::uint32_t old, std::uint32_t cb, EMU_PLACE) {
    EMU_HERE;
    emu_reconfig_from(emulator::PACKER, old, cb);
}
