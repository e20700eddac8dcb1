// SPDX-License-Identifier: Apache-2.0
// cb 1 [rt, ct] = cb 0 [rt, k] times cb 2 [k, ct], with matmul_block or, with TILES defined, tile by tile.
// named: rt, ct, k_tiles.
#include "api/compute/common.h"
#include "api/compute/matmul.h"

void kernel_main() {
    constexpr uint32_t rt = get_named_compile_time_arg_val("rt");
    constexpr uint32_t ct = get_named_compile_time_arg_val("ct");
    constexpr uint32_t k_tiles = get_named_compile_time_arg_val("k_tiles");
    compute_kernel_hw_startup<SrcOrder::Reverse>(0, 2, 1);
    cb_wait_front(0, rt * k_tiles);
    cb_wait_front(2, k_tiles * ct);
    cb_reserve_back(1, rt * ct);
#ifdef TILES
    matmul_init(0, 2);
#else
    matmul_block_init(0, 2, 0, ct, rt, k_tiles);
#endif
    tile_regs_acquire();
    for (uint32_t k = 0; k < k_tiles; k++) {
#ifdef TILES
        for (uint32_t r = 0; r < rt; r++) {
            for (uint32_t c = 0; c < ct; c++) {
                matmul_tiles(0, 2, r * k_tiles + k, k * ct + c, r * ct + c);
            }
        }
#else
        matmul_block(0, 2, k, k * ct, 0, 0, ct, rt, k_tiles);
#endif
    }
    tile_regs_commit();
    tile_regs_wait();
    for (uint32_t i = 0; i < rt * ct; i++) {
        pack_tile(i, 1);
    }
    tile_regs_release();
    cb_push_back(1, rt * ct);
    cb_pop_front(0, rt * k_tiles);
    cb_pop_front(2, k_tiles * ct);
}
