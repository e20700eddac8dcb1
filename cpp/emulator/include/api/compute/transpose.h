// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common.h"

template <bool fp32 = DST_ACCUM_MODE>
inline void transpose_init(std::uint32_t icb, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_transpose_init(icb);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void transpose_tile(std::uint32_t icb, std::uint32_t tile, std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_transpose(icb, tile, dst);
}
