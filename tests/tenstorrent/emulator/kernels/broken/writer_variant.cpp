// SPDX-License-Identifier: Apache-2.0
// As write_tiles.cpp with one mistake, chosen by a definition.
#include "api/dataflow/dataflow_api.h"

void kernel_main() {
    constexpr auto target_args = TensorAccessorArgs<0>();
    const auto target = TensorAccessor(target_args, get_common_arg_val<uint32_t>(0));
    const uint32_t first = get_arg_val<uint32_t>(0);
    const uint32_t count = get_arg_val<uint32_t>(1);
    for (uint32_t page = first; page < first + count; page++) {
#if !defined(NO_WAIT)
        cb_wait_front(1, 1);
#endif
        noc_async_write(get_read_ptr(1), target.get_noc_addr(page), target.get_aligned_page_size());
#if !defined(NO_FLUSH)
        noc_async_writes_flushed();
#endif
#if defined(OVERWRITES)
        noc_async_write(get_read_ptr(1), target.get_noc_addr(page), target.get_aligned_page_size());
        *reinterpret_cast<volatile tt_l1_ptr uint32_t*>(static_cast<uintptr_t>(get_read_ptr(1))) = 0;
#endif
        cb_pop_front(1, 1);
#if defined(POP_TWICE)
        cb_pop_front(1, 1);
#endif
    }
#if !defined(NO_BARRIER)
    noc_async_write_barrier();
#endif
}
