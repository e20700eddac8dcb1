// SPDX-License-Identifier: Apache-2.0
// Compute side of a product (pieces.hpp): one block times one piece, with the partial sum passed here added.
#pragma once

#include "api/compute/compute_kernel_api.h"
#include "api/compute/eltwise_binary_sfpu.h"
#include "api/compute/matmul.h"
#include "api/compute/pack.h"
#include "api/compute/reconfig_data_format.h"
#include "api/compute/reg_api.h"
#include "api/compute/tile_move_copy.h"

namespace moe {

// DST[i] = x tiles [x0, x0 + tiles) times weight tiles [w0 + i * tiles, w0 + (i + 1) * tiles), i < width.
template <uint32_t width>
inline void multiply(uint32_t cb_x, uint32_t cb_w, uint32_t x0, uint32_t w0, uint32_t tiles) {
    reconfig_data_format<SrcOrder::Reverse>(cb_x, cb_w);
    matmul_block_init(cb_x, cb_w, 0, 1, 1, 1);
    for (uint32_t k = 0; k < tiles; k++) {
        for (uint32_t i = 0; i < width; i++) {
            matmul_block(cb_x, cb_w, x0 + k, w0 + i * tiles + k, i, 0, 1, 1, 1);
        }
    }
}

// DST[i] += the partial sum that came, i < width; DST[width .. 2 width) is used for it.
template <uint32_t width>
inline void add_partial(uint32_t cb_in) {
    cb_wait_front(cb_in, width);
    reconfig_data_format_srca(cb_in);
    copy_init(cb_in);
    for (uint32_t i = 0; i < width; i++) {
        copy_tile(cb_in, i, width + i);
    }
    add_binary_tile_init();
    for (uint32_t i = 0; i < width; i++) {
        add_binary_tile(i, width + i, i);
    }
}

// DST[0] = silu(DST[0]) * DST[1]
inline void silu_mul() {
    silu_tile_init();
    silu_tile(0);
    mul_binary_tile_init();
    mul_binary_tile(0, 1, 0);
}

// Pack DST[0 .. width) to cb, and hand it on. Between tile_regs_commit and tile_regs_release.
template <uint32_t width>
inline void pack_to(uint32_t cb) {
    cb_reserve_back(cb, width);
    pack_reconfig_data_format(cb);
    for (uint32_t i = 0; i < width; i++) {
        pack_tile(i, cb);
    }
    cb_push_back(cb, width);
}

}  // namespace moe
