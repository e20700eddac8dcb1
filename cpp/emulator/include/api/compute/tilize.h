// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common.h"

template <bool fp32 = DST_ACCUM_MODE>
inline void tilize_init(std::uint32_t icb, std::uint32_t block, std::uint32_t ocb, std::uint32_t = 0,
                        EMU_PLACE) {
    EMU_HERE;
    emu_tilize_init(icb, block, ocb);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void tilize_block(std::uint32_t icb, std::uint32_t block, std::uint32_t ocb, std::uint32_t in_tile = 0,
                         std::uint32_t out_tile = 0, EMU_PLACE) {
    EMU_HERE;
    emu_tilize_block(icb, block, ocb, in_tile, out_tile);
}
inline void tilize_uninit(std::uint32_t icb, std::uint32_t ocb, EMU_PLACE) {
    EMU_HERE;
    emu_tilize_uninit(icb, ocb);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void fast_tilize_init(std::uint32_t icb, std::uint32_t block, std::uint32_t ocb, std::uint32_t = 0,
                             EMU_PLACE) {
    EMU_HERE;
    emu_tilize_init(icb, block, ocb);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void fast_tilize_block(std::uint32_t icb, std::uint32_t block, std::uint32_t ocb,
                              std::uint32_t in_tile = 0, std::uint32_t out_tile = 0, EMU_PLACE) {
    EMU_HERE;
    emu_tilize_block(icb, block, ocb, in_tile, out_tile);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void fast_tilize_uninit(std::uint32_t icb, std::uint32_t ocb, std::uint32_t, EMU_PLACE) {
    EMU_HERE;
    emu_tilize_uninit(icb, ocb);
}
