// SPDX-License-Identifier: Apache-2.0
// As read_tiles.cpp, but pages are pushed before their reads have landed.
#include "api/dataflow/dataflow_api.h"

void kernel_main() {
    constexpr auto source_args = TensorAccessorArgs<0>();
    const auto source = TensorAccessor(source_args, get_common_arg_val<uint32_t>(0));
    const uint32_t first = get_arg_val<uint32_t>(0);
    const uint32_t count = get_arg_val<uint32_t>(1);
    for (uint32_t page = first; page < first + count; page++) {
        cb_reserve_back(0, 1);
        noc_async_read(source.get_noc_addr(page), get_write_ptr(0), source.get_aligned_page_size());
        cb_push_back(0, 1);
    }
    noc_async_read_barrier();
}
