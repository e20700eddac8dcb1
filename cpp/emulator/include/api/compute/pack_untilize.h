// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common.h"

constexpr std::uint32_t TILE_C_DIM = 32, TILE_R_DIM = 32;

template <std::uint32_t block_ct = 8, std::uint32_t full_ct = block_ct, bool narrow_row = false,
          std::uint32_t row_datums = TILE_C_DIM, bool dense = false, bool remap = true,
          bool fp32 = DST_ACCUM_MODE>
inline void pack_untilize_dest_init(std::uint32_t ocb, std::uint32_t = 0, EMU_PLACE) {
    static_assert(!narrow_row && row_datums == TILE_C_DIM && !dense,
                  "the emulator packs whole rows of tiles only");
    EMU_HERE;
    emu_pack_untilize_init(ocb, block_ct, full_ct);
}
template <std::uint32_t block_ct = 8, std::uint32_t full_ct = block_ct, bool fp32 = DST_ACCUM_MODE>
inline void pack_untilize_init(std::uint32_t icb, std::uint32_t ocb, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_copy_init(icb, 0);
    emu_pack_untilize_init(ocb, block_ct, full_ct);
}
template <std::uint32_t block_ct = 8, std::uint32_t full_ct = block_ct, bool fp32 = DST_ACCUM_MODE>
inline void pack_untilize_block(std::uint32_t icb, std::uint32_t rt, std::uint32_t ocb,
                                std::uint32_t column_block = 0, EMU_PLACE) {
    EMU_HERE;
    emu_pack_untilize_block(icb, ocb, block_ct, full_ct, rt, column_block);
}
template <std::uint32_t block_ct = 8, std::uint32_t full_ct = block_ct, bool diagonal = false,
          bool narrow_row = false, std::uint32_t row_datums = TILE_C_DIM, std::uint32_t dst_offset = 0,
          bool dense = false>
inline void pack_untilize_dest(std::uint32_t ocb, std::uint32_t rt = 1, std::uint32_t column_block = 0,
                               std::uint32_t dst_row = 0, EMU_PLACE) {
    static_assert(!diagonal && !narrow_row && row_datums == TILE_C_DIM && !dense,
                  "the emulator packs whole rows of tiles only");
    EMU_HERE;
    emu_pack_untilize_dest(ocb, block_ct, full_ct, rt, column_block, dst_offset + dst_row * block_ct);
}
template <bool fp32 = DST_ACCUM_MODE>
inline void pack_untilize_uninit(std::uint32_t ocb, EMU_PLACE) {
    EMU_HERE;
    emu_pack_untilize_uninit(ocb);
}
