// SPDX-License-Identifier: Apache-2.0
// Writes what arrives in cb 1 to pages [first, first + count) of a tensor.
// common args: address. args: first, count.
#include "api/dataflow/dataflow_api.h"

void kernel_main() {
    constexpr auto target_args = TensorAccessorArgs<0>();
    const auto target = TensorAccessor(target_args, get_common_arg_val<uint32_t>(0));
    const uint32_t first = get_arg_val<uint32_t>(0);
    const uint32_t count = get_arg_val<uint32_t>(1);
    for (uint32_t page = first; page < first + count; page++) {
        cb_wait_front(1, 1);
        noc_async_write(get_read_ptr(1), target.get_noc_addr(page), target.get_aligned_page_size());
        noc_async_writes_flushed();
        cb_pop_front(1, 1);
    }
    noc_async_write_barrier();
}
