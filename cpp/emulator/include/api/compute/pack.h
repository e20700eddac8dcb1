// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common_globals.h"

inline void pack_init(std::uint32_t ocb, EMU_PLACE) {
    EMU_HERE;
    emu_pack_init(ocb);
}
template <bool out_of_order_output = false, bool fp32 = DST_ACCUM_MODE>
inline void pack_tile(std::uint32_t dst, std::uint32_t cb, std::uint32_t tile = 0, EMU_PLACE) {
    EMU_HERE;
    emu_pack_tile(dst, cb, tile, out_of_order_output ? 1 : 0);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void pack_block(std::uint32_t dst, std::uint32_t cb, std::uint32_t tiles, EMU_PLACE) {
    EMU_HERE;
    for (std::uint32_t i = 0; i < tiles; ++i) {
        emu_pack_tile(dst + i, cb, 0, 0);
    }
}
inline void pack_reconfig_l1_acc(std::uint32_t on, EMU_PLACE) {
    EMU_HERE;
    emu_pack_l1_accumulate(on);
}
