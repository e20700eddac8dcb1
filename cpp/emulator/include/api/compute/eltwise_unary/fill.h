// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common.h"

inline void fill_tile_init(EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_init(emulator::SFPU_FILL);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void fill_tile(std::uint32_t dst, float value, EMU_PLACE) {
    EMU_HERE;
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    emu_sfpu_unary(emulator::SFPU_FILL, dst, bits);
}
