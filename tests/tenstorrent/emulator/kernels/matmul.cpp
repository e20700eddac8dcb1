// SPDX-License-Identifier: Apache-2.0
// cb 1 = sum over k of cb 0 times cb 2, for each output tile. named: k_tiles. args: first, count.
#include "api/compute/matmul.h"

#include "api/compute/common.h"

void kernel_main() {
    constexpr uint32_t k_tiles = get_named_compile_time_arg_val("k_tiles");
    const uint32_t count = get_arg_val<uint32_t>(1);
    compute_kernel_hw_startup<SrcOrder::Reverse>(0, 2, 1);
    matmul_init(0, 2);
    for (uint32_t i = 0; i < count; i++) {
        tile_regs_acquire();
        for (uint32_t k = 0; k < k_tiles; k++) {
            cb_wait_front(0, 1);
            cb_wait_front(2, 1);
            matmul_tiles(0, 2, 0, 0, 0);
            cb_pop_front(0, 1);
            cb_pop_front(2, 1);
        }
        tile_regs_commit();
        cb_reserve_back(1, 1);
        tile_regs_wait();
        pack_tile(0, 1);
        tile_regs_release();
        cb_push_back(1, 1);
    }
}
