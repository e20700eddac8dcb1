// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common.h"

template <bool fp32 = DST_ACCUM_MODE>
inline void untilize_init(std::uint32_t icb, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_untilize_init(icb);
}
template <std::uint32_t block_ct = 1, bool fp32 = DST_ACCUM_MODE>
inline void untilize_block(std::uint32_t icb, std::uint32_t full_ct, std::uint32_t ocb, EMU_PLACE) {
    EMU_HERE;
    emu_untilize_block(icb, full_ct, ocb);
}
inline void untilize_uninit(std::uint32_t icb, EMU_PLACE) {
    EMU_HERE;
    emu_untilize_uninit(icb);
}
