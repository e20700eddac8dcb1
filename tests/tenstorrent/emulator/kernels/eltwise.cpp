// SPDX-License-Identifier: Apache-2.0
// cb 1 = cb 0 OP cb 2, where cb 2 is broadcast as BROADCAST says; named: how (0 none, 1 column, 2 row, 3
// scalar), op (0 add, 1 sub, 2 mul). args: first, count.
#include "api/compute/bcast.h"
#include "api/compute/common.h"
#include "api/compute/eltwise_binary.h"

void kernel_main() {
    constexpr auto how = static_cast<BroadcastType>(get_named_compile_time_arg_val("how"));
    constexpr uint32_t op = get_named_compile_time_arg_val("op");
    const uint32_t count = get_arg_val<uint32_t>(1);
    compute_kernel_hw_startup(0, 2, 1);
    if constexpr (how != BroadcastType::NONE) {
        bcast_init<static_cast<EltwiseBinaryType>(op), how>(0, 2);
    } else if constexpr (op == 0) {
        add_init(0, 2);
    } else if constexpr (op == 1) {
        sub_init(0, 2);
    } else {
        mul_init(0, 2);
    }
    for (uint32_t i = 0; i < count; i++) {
        cb_wait_front(0, 1);
        cb_wait_front(2, 1);
        cb_reserve_back(1, 1);
        tile_regs_acquire();
        if constexpr (how != BroadcastType::NONE) {
            if constexpr (op == 0) {
                add_tiles_bcast<how>(0, 2, 0, 0, 0);
            } else if constexpr (op == 1) {
                sub_tiles_bcast<how>(0, 2, 0, 0, 0);
            } else {
                mul_tiles_bcast<how>(0, 2, 0, 0, 0);
            }
        } else if constexpr (op == 0) {
            add_tiles(0, 2, 0, 0, 0);
        } else if constexpr (op == 1) {
            sub_tiles(0, 2, 0, 0, 0);
        } else {
            mul_tiles(0, 2, 0, 0, 0);
        }
        tile_regs_commit();
        tile_regs_wait();
        pack_tile(0, 1);
        tile_regs_release();
        cb_pop_front(0, 1);
        cb_pop_front(2, 1);
        cb_push_back(1, 1);
    }
}
