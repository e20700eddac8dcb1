// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common.h"
#include "api/compute/tile_move_copy.h"

template <bool fp32 = DST_ACCUM_MODE>
inline void unary_op_init_common(std::uint32_t icb, std::uint32_t ocb, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_hw_startup(icb, icb, ocb);
    emu_copy_init(icb, 0);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void init_sfpu(std::uint32_t icb, std::uint32_t ocb, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_hw_startup(icb, icb, ocb);
    emu_copy_init(icb, 0);
}
