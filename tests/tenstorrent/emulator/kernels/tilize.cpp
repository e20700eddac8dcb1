// SPDX-License-Identifier: Apache-2.0
// Rows in cb 0 (one page: 32 rows of `block` tiles) -> tiles in cb 1, or back with UNTILIZE defined. args:
// first, count.
#include "api/compute/tilize.h"

#include "api/compute/common.h"
#include "api/compute/pack_untilize.h"

void kernel_main() {
    constexpr uint32_t block = get_named_compile_time_arg_val("block");
    const uint32_t count = get_arg_val<uint32_t>(1) / block;
    compute_kernel_hw_startup(0, 1);
#ifdef UNTILIZE
    pack_untilize_init<block>(0, 1);
#else
    tilize_init(0, block, 1);
#endif
    for (uint32_t i = 0; i < count; i++) {
        cb_wait_front(0, block);
        cb_reserve_back(1, block);
#ifdef UNTILIZE
        pack_untilize_block<block>(0, 1, 1);
#else
        tilize_block(0, block, 1);
#endif
        cb_push_back(1, block);
        cb_pop_front(0, block);
    }
#ifdef UNTILIZE
    pack_untilize_uninit(1);
#else
    tilize_uninit(0, 1);
#endif
}
