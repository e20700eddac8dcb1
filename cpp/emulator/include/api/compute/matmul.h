// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/compute/common.h"

inline void matmul_init(std::uint32_t in0, std::uint32_t in1, std::uint32_t transpose = 0, std::uint32_t = 0,
                        EMU_PLACE) {
    EMU_HERE;
    emu_matmul_init(in0, in1, transpose, 1, 1, 1, 0);
}
inline void matmul_tiles(std::uint32_t in0, std::uint32_t in1, std::uint32_t tile0, std::uint32_t tile1,
                         std::uint32_t dst, EMU_PLACE) {
    EMU_HERE;
    emu_matmul(in0, in1, tile0, tile1, dst, 0, 1, 1, 1, 0);
}
inline void matmul_block_init(std::uint32_t in0, std::uint32_t in1, std::uint32_t transpose = 0,
                              std::uint32_t ct = 1, std::uint32_t rt = 1, std::uint32_t kt = 1,
                              std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_matmul_init(in0, in1, transpose, ct, rt, kt, 1);
}
inline void matmul_block(std::uint32_t in0, std::uint32_t in1, std::uint32_t tile0, std::uint32_t tile1,
                         std::uint32_t dst, std::uint32_t transpose, std::uint32_t ct, std::uint32_t rt,
                         std::uint32_t kt, std::uint32_t = 0, EMU_PLACE) {
    EMU_HERE;
    emu_matmul(in0, in1, tile0, tile1, dst, transpose, ct, rt, kt, 1);
}
