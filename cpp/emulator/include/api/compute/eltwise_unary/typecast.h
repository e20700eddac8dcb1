// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common.h"

template <std::uint32_t IN_DTYPE, std::uint32_t OUT_DTYPE>
inline void typecast_tile_init(EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_init(emulator::SFPU_TYPECAST);
}
template <std::uint32_t IN_DTYPE, std::uint32_t OUT_DTYPE, bool fp32 = DST_ACCUM_MODE>
inline void typecast_tile(std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_unary(emulator::SFPU_TYPECAST, dst, IN_DTYPE << 8 | OUT_DTYPE);
}
