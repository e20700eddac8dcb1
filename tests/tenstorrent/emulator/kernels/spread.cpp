// SPDX-License-Identifier: Apache-2.0
// Core 0 reads `count` pages and multicasts each to all cores of the program; every core writes what came to
// pages of its own. Two semaphores: 0 "room" counts receivers that are ready, 1 "there" says that a page has
// arrived. named: cores, loopback. common args: source, target, x and y of the first and of the last core, x
// and y of core 0. args: core, count.
#include "api/dataflow/dataflow_api.h"

void kernel_main() {
    constexpr uint32_t cores = get_named_compile_time_arg_val("cores");
    constexpr auto source_args = TensorAccessorArgs<0>();
    constexpr auto target_args = TensorAccessorArgs<source_args.next_compile_time_args_offset()>();
    const auto source = TensorAccessor(source_args, get_common_arg_val<uint32_t>(0));
    const auto target = TensorAccessor(target_args, get_common_arg_val<uint32_t>(1));
    const uint32_t x0 = get_common_arg_val<uint32_t>(2), y0 = get_common_arg_val<uint32_t>(3);
    const uint32_t x1 = get_common_arg_val<uint32_t>(4), y1 = get_common_arg_val<uint32_t>(5);
    const uint32_t me = get_arg_val<uint32_t>(0);
    const uint32_t count = get_arg_val<uint32_t>(1);
    const uint32_t bytes = source.get_aligned_page_size();
    auto* room = reinterpret_cast<volatile tt_l1_ptr uint32_t*>(get_semaphore(0));
    auto* there = reinterpret_cast<volatile tt_l1_ptr uint32_t*>(get_semaphore(1));
    const uint32_t page_at = get_write_ptr(0);
    for (uint32_t i = 0; i < count; i++) {
        cb_reserve_back(0, 1);
        if (me == 0) {
            noc_semaphore_wait(room, cores - 1);
            noc_semaphore_set(room, 0);
            noc_async_read(source.get_noc_addr(i), page_at, bytes);
            noc_async_read_barrier();
            noc_async_write_multicast(page_at, get_noc_multicast_addr(x0, y0, x1, y1, page_at), bytes,
                                      cores - 1);
            noc_async_writes_flushed();
            noc_semaphore_set(there, 1);
            noc_semaphore_set_multicast(get_semaphore(1),
                                        get_noc_multicast_addr(x0, y0, x1, y1, get_semaphore(1)), cores - 1);
            noc_async_write_barrier();
        } else {
            noc_semaphore_set(there, 0);
            noc_semaphore_inc(get_noc_addr(get_common_arg_val<uint32_t>(6), get_common_arg_val<uint32_t>(7),
                                           get_semaphore(0)),
                              1);
            noc_semaphore_wait(there, 1);
        }
        cb_push_back(0, 1);
        cb_wait_front(0, 1);
        noc_async_write(page_at, target.get_noc_addr(me * count + i), bytes);
        noc_async_write_barrier();
        cb_pop_front(0, 1);
    }
    noc_async_atomic_barrier();
}
