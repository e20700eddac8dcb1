// SPDX-License-Identifier: Apache-2.0
// As unary.cpp with one mistake, chosen by a definition.
#include "api/compute/common.h"
#include "api/compute/compute_kernel_api.h"
#include "api/compute/eltwise_binary.h"
#include "api/compute/matmul.h"
#include "api/compute/pack_untilize.h"
#include "api/compute/tile_move_copy.h"

void kernel_main() {
    const uint32_t count = get_arg_val<uint32_t>(1);
#if defined(WRONG_FORMAT)
    compute_kernel_hw_startup(1, 1);
#elif !defined(NO_STARTUP)
    compute_kernel_hw_startup(0, 1);
#endif
#if defined(OTHER_INIT)
    matmul_init(0, 0);
#elif !defined(NO_INIT)
    copy_init(0);
#endif
#if defined(UNTILIZES)
    pack_untilize_dest_init<1>(1);
#endif
#if !defined(NO_SILU_INIT)
    silu_tile_init();
#endif
    for (uint32_t i = 0; i < count; i++) {
#if !defined(NO_WAIT)
        cb_wait_front(0, 1);
#endif
#if !defined(NO_RESERVE)
        cb_reserve_back(1, 1);
#endif
#if !defined(NO_ACQUIRE)
        tile_regs_acquire();
#endif
#if defined(BEYOND_DST)
        copy_tile(0, 0, 8);
#elif defined(SECOND_TILE)
        copy_tile(0, 1, 0);
#elif !defined(NO_COPY)
        copy_tile(0, 0, 0);
#endif
        silu_tile(0);
#if !defined(NO_COMMIT)
        tile_regs_commit();
        tile_regs_wait();
#endif
        pack_tile(0, 1);
#if !defined(NO_RELEASE)
        tile_regs_release();
#endif
        cb_pop_front(0, 1);
        cb_push_back(1, 1);
    }
}
