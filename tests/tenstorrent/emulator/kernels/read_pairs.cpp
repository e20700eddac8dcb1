// SPDX-License-Identifier: Apache-2.0
// Reads page i of two tensors into cb 0 and cb 2, for i in [first, first + count).
// common args: addresses. args: first, count.
#include "api/dataflow/dataflow_api.h"

void kernel_main() {
    constexpr auto a_args = TensorAccessorArgs<0>();
    constexpr auto b_args = TensorAccessorArgs<a_args.next_compile_time_args_offset()>();
    const auto a = TensorAccessor(a_args, get_common_arg_val<uint32_t>(0));
    const auto b = TensorAccessor(b_args, get_common_arg_val<uint32_t>(1));
    const uint32_t first = get_arg_val<uint32_t>(0);
    for (uint32_t page = first; page < first + get_arg_val<uint32_t>(1); page++) {
        cb_reserve_back(0, 1);
        cb_reserve_back(2, 1);
        noc_async_read_tile(page, a, get_write_ptr(0));
        noc_async_read_tile(page, b, get_write_ptr(2));
        noc_async_read_barrier();
        cb_push_back(0, 1);
        cb_push_back(2, 1);
    }
}
