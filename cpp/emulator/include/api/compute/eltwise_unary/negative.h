// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common.h"

inline void negative_tile_init(EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_init(emulator::SFPU_NEGATIVE);
}
inline void negative_tile(std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_unary(emulator::SFPU_NEGATIVE, dst, 0);
}
