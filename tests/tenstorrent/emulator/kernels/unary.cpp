// SPDX-License-Identifier: Apache-2.0
// cb 1 = f(cb 0), tile by tile; f is SiLU if SILU is defined, else the identity. args: first, count.
#include "api/compute/common.h"
#include "api/compute/compute_kernel_api.h"
#include "api/compute/tile_move_copy.h"

void kernel_main() {
    const uint32_t count = get_arg_val<uint32_t>(1);
    compute_kernel_hw_startup(0, 1);
    copy_init(0);
#ifdef SILU
    silu_tile_init();
#endif
    for (uint32_t i = 0; i < count; i++) {
        cb_wait_front(0, 1);
        cb_reserve_back(1, 1);
        tile_regs_acquire();
        copy_tile(0, 0, 0);
#ifdef SILU
        silu_tile(0);
#endif
        tile_regs_commit();
        tile_regs_wait();
        pack_tile(0, 1);
        tile_regs_release();
        cb_pop_front(0, 1);
        cb_push_back(1, 1);
    }
}
