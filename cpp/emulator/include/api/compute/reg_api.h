// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common_globals.h"

inline void tile_regs_acquire(EMU_PLACE) {
    EMU_HERE;
    emu_tile_regs_acquire();
}
inline void tile_regs_wait(EMU_PLACE) {
    EMU_HERE;
    emu_tile_regs_wait();
}
template <bool fp32 = DST_ACCUM_MODE>
inline void tile_regs_commit(EMU_PLACE) {
    EMU_HERE;
    emu_tile_regs_commit();
}
template <bool fp32 = DST_ACCUM_MODE>
inline void tile_regs_release(EMU_PLACE) {
    EMU_HERE;
    emu_tile_regs_release();
}
