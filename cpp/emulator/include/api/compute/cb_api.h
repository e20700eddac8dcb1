// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common_globals.h"

inline std::uint32_t get_tile_address(std::uint32_t cb, std::uint32_t tile, EMU_PLACE) {
    EMU_HERE;
    return emu_cb_tile_address(cb, tile);
}
inline std::uint32_t read_tile_value(std::uint32_t cb, std::uint32_t tile, std::uint32_t element, EMU_PLACE) {
    EMU_HERE;
    return reinterpret_cast<volatile std::uint32_t*>(
        static_cast<std::uintptr_t>(emu_cb_tile_address(cb, tile)))[element];
}
