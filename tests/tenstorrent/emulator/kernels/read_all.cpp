// SPDX-License-Identifier: Apache-2.0
// Reads all pages of two tensors into cb 0 and cb 2, each in one go. named: a_pages, b_pages. common args:
// addresses.
#include "api/dataflow/dataflow_api.h"

void kernel_main() {
    constexpr uint32_t a_pages = get_named_compile_time_arg_val("a_pages");
    constexpr uint32_t b_pages = get_named_compile_time_arg_val("b_pages");
    constexpr auto a_args = TensorAccessorArgs<0>();
    constexpr auto b_args = TensorAccessorArgs<a_args.next_compile_time_args_offset()>();
    const auto a = TensorAccessor(a_args, get_common_arg_val<uint32_t>(0));
    const auto b = TensorAccessor(b_args, get_common_arg_val<uint32_t>(1));
    cb_reserve_back(0, a_pages);
    cb_reserve_back(2, b_pages);
    for (uint32_t i = 0; i < a_pages; i++) {
        noc_async_read_page(i, a, get_write_ptr(0) + i * get_tile_size(0));
    }
    for (uint32_t i = 0; i < b_pages; i++) {
        noc_async_read_page(i, b, get_write_ptr(2) + i * get_tile_size(2));
    }
    noc_async_read_barrier();
    cb_push_back(0, a_pages);
    cb_push_back(2, b_pages);
}
