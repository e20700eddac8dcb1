// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common.h"

template <bool approximate = false, bool fp32 = DST_ACCUM_MODE>
inline void recip_tile_init(EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_init(emulator::SFPU_RECIP);
}
template <bool approximate = false, bool fp32 = DST_ACCUM_MODE>
inline void recip_tile(std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_unary(emulator::SFPU_RECIP, dst, 0);
}
