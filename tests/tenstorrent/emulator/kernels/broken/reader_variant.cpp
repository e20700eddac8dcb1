// SPDX-License-Identifier: Apache-2.0
// As read_tiles.cpp with one mistake, chosen by a definition.
#include "api/dataflow/dataflow_api.h"

void kernel_main() {
    constexpr auto source_args = TensorAccessorArgs<0>();
    const auto source = TensorAccessor(source_args, get_common_arg_val<uint32_t>(0));
    const uint32_t first = get_arg_val<uint32_t>(0);
    const uint32_t count = get_arg_val<uint32_t>(1);
    for (uint32_t page = first; page < first + count; page++) {
#if defined(NO_RESERVE)
#elif defined(RESERVE_TOO_MANY)
        cb_reserve_back(0, 3);
#else
        cb_reserve_back(0, 1);
#endif
        uint32_t to = get_write_ptr(0);
        uint64_t from = source.get_noc_addr(page);
        uint32_t bytes = source.get_aligned_page_size();
#if defined(UNALIGNED)
        from += UNALIGNED;
        bytes -= UNALIGNED;
#elif defined(PAST_THE_END)
        from = source.get_noc_addr(page + 1000);
#elif defined(LAST_ROW)
        from = source.get_noc_addr(page + 6);
#elif defined(TOO_LONG)
        bytes *= 4;
#elif defined(TWICE)
        noc_async_read(from, to, bytes);
#elif defined(OUTSIDE_L1)
        to += 1 << 20;
#endif
        noc_async_read(from, to, bytes);
#if !defined(NEVER_WAITS)
        noc_async_read_barrier();
#endif
        cb_push_back(0, 1);
#if defined(PUSH_TWICE)
        cb_push_back(0, 1);
#elif defined(DROPS)
        if (page == first) {
            return;
        }
#elif defined(FOREIGN_STORE)
        *reinterpret_cast<volatile tt_l1_ptr uint32_t*>(static_cast<uintptr_t>(get_write_ptr(0) + 0x200000)) =
            1;
#endif
    }
#if defined(ONE_MORE)
    cb_reserve_back(0, 1);
    noc_async_read(source.get_noc_addr(first), get_write_ptr(0), source.get_aligned_page_size());
    noc_async_read_barrier();
    cb_push_back(0, 1);
#endif
}
