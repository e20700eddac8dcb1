// SPDX-License-Identifier: Apache-2.0
// silu_mul, writer: writes tiles [first, end) of the product.
//
// | out     [rows, I]  bf16  tiles  out
// | cb_out  one tile at a time  <- compute
//
// | common args  out
// | args         first, end
#include "api/dataflow/dataflow_api.h"

namespace {

constexpr uint32_t cb_out = get_named_compile_time_arg_val("cb_out");
constexpr uint32_t kTileBytes = 2048;
constexpr auto out_args = TensorAccessorArgs<0>();

}  // namespace

void kernel_main() {
    const auto out = TensorAccessor(out_args, get_common_arg_val<uint32_t>(0));
    const uint32_t end = get_arg_val<uint32_t>(1);
    for (uint32_t tile = get_arg_val<uint32_t>(0); tile < end; tile++) {
        cb_wait_front(cb_out, 1);
        noc_async_write(get_read_ptr(cb_out), out.get_noc_addr(tile), kTileBytes);
        noc_async_write_barrier();
        cb_pop_front(cb_out, 1);
    }
}
