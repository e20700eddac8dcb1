// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common_globals.h"

template <SrcOrder order = SrcOrder::Regular>
inline void compute_kernel_hw_startup(std::uint32_t icb0, std::uint32_t icb1, std::uint32_t ocb, EMU_PLACE) {
    EMU_HERE;
    constexpr bool reverse = order == SrcOrder::Reverse;
    emu_hw_startup(reverse ? icb1 : icb0, reverse ? icb0 : icb1, ocb);
}
inline void compute_kernel_hw_startup(std::uint32_t icb, std::uint32_t ocb, EMU_PLACE) {
    EMU_HERE;
    emu_hw_startup(icb, icb, ocb);
}
