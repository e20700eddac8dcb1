// SPDX-License-Identifier: Apache-2.0
// Moves blocks of 32 rows between a row-major tensor and a circular buffer of whole blocks: to cb 0, or from
// cb 1 with WRITE defined. named: block (tiles in a row), row_bytes. common args: address. args: first, count
// (tiles).
#include "api/dataflow/dataflow_api.h"

void kernel_main() {
    constexpr uint32_t block = get_named_compile_time_arg_val("block");
    constexpr uint32_t row_bytes = get_named_compile_time_arg_val("row_bytes");
    constexpr auto tensor_args = TensorAccessorArgs<0>();
    const auto tensor = TensorAccessor(tensor_args, get_common_arg_val<uint32_t>(0));
    const uint32_t first = get_arg_val<uint32_t>(0) / block;
    const uint32_t count = get_arg_val<uint32_t>(1) / block;
    for (uint32_t b = first; b < first + count; b++) {
#ifdef WRITE
        cb_wait_front(1, block);
        for (uint32_t row = 0; row < 32; row++) {
            noc_async_write(get_read_ptr(1) + row * row_bytes, tensor.get_noc_addr(b * 32 + row), row_bytes);
        }
        noc_async_write_barrier();
        cb_pop_front(1, block);
#else
        cb_reserve_back(0, block);
        for (uint32_t row = 0; row < 32; row++) {
            noc_async_read(tensor.get_noc_addr(b * 32 + row), get_write_ptr(0) + row * row_bytes, row_bytes);
        }
        noc_async_read_barrier();
        cb_push_back(0, block);
#endif
    }
}
