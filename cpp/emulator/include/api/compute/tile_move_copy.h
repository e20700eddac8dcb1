// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common_globals.h"
#include "api/compute/reconfig_data_format.h"

template <bool fp32 = DST_ACCUM_MODE>
inline void copy_init(std::uint32_t cb, std::uint32_t transpose = 0, std::uint32_t within_face = 0,
                      std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    if (transpose != within_face) {
        emu_unsupported("copy_init with only one of the two transpositions");
    }
    emu_copy_init(cb, transpose);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void copy_tile_init(std::uint32_t cb, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_copy_init(cb, 0);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void copy_tile_to_dst_init_short(std::uint32_t cb, std::uint32_t transpose = 0, EMU_PLACE) {
    EMU_HERE;
    emu_copy_init(cb, transpose);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void copy_tile(std::uint32_t cb, std::uint32_t tile, std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_copy_tile(cb, tile, dst);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void copy_block(std::uint32_t cb, std::uint32_t tile, std::uint32_t dst, std::uint32_t tiles,
                       EMU_PLACE) {
    EMU_HERE;
    for (std::uint32_t i = 0; i < tiles; ++i) {
        emu_copy_tile(cb, tile + i, dst + i);
    }
}
