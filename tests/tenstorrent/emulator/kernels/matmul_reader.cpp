// SPDX-License-Identifier: Apache-2.0
// For each of `count` output tiles from `first` on: the k tiles of a's row and of b's column, into cb 0 and
// cb 2. compile args: a, b. named: m_tiles, k_tiles, n_tiles. common args: a, b. args: first, count.
#include "api/dataflow/dataflow_api.h"

void kernel_main() {
    constexpr uint32_t k_tiles = get_named_compile_time_arg_val("k_tiles");
    constexpr uint32_t n_tiles = get_named_compile_time_arg_val("n_tiles");
    constexpr auto a_args = TensorAccessorArgs<0>();
    constexpr auto b_args = TensorAccessorArgs<a_args.next_compile_time_args_offset()>();
    const auto a = TensorAccessor(a_args, get_common_arg_val<uint32_t>(0));
    const auto b = TensorAccessor(b_args, get_common_arg_val<uint32_t>(1));
    const uint32_t first = get_arg_val<uint32_t>(0);
    const uint32_t count = get_arg_val<uint32_t>(1);
    for (uint32_t out = first; out < first + count; out++) {
        for (uint32_t k = 0; k < k_tiles; k++) {
            cb_reserve_back(0, 1);
            cb_reserve_back(2, 1);
            noc_async_read_page((out / n_tiles) * k_tiles + k, a, get_write_ptr(0));
            noc_async_read_page(k * n_tiles + out % n_tiles, b, get_write_ptr(2));
            noc_async_read_barrier();
            cb_push_back(0, 1);
            cb_push_back(2, 1);
        }
    }
}
