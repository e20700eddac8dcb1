// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common.h"

template <auto... options>
inline void copy_dest_values_init(EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_init(emulator::SFPU_COPY);
}
template <auto... options>
inline void copy_dest_values(std::uint32_t from, std::uint32_t to, EMU_PLACE) {
    EMU_HERE;
    emu_sfpu_binary(emulator::COPY, from, from, to);
}
