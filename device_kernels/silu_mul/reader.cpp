// SPDX-License-Identifier: Apache-2.0
// silu_mul, reader: streams tiles [first, end) of gate and up to compute.
//
// | gate, up        [rows, I]  bf16  tiles  in
// | cb_gate, cb_up  one tile at a time  -> compute
//
// | common args  gate, up
// | args         first, end
#include "api/dataflow/dataflow_api.h"

namespace {

constexpr uint32_t cb_gate = get_named_compile_time_arg_val("cb_gate");
constexpr uint32_t cb_up = get_named_compile_time_arg_val("cb_up");
constexpr uint32_t kTileBytes = 2048;
constexpr auto gate_args = TensorAccessorArgs<0>();
constexpr auto up_args = TensorAccessorArgs<gate_args.next_compile_time_args_offset()>();

}  // namespace

void kernel_main() {
    const auto gate = TensorAccessor(gate_args, get_common_arg_val<uint32_t>(0));
    const auto up = TensorAccessor(up_args, get_common_arg_val<uint32_t>(1));
    const uint32_t end = get_arg_val<uint32_t>(1);
    for (uint32_t tile = get_arg_val<uint32_t>(0); tile < end; tile++) {
        cb_reserve_back(cb_gate, 1);
        cb_reserve_back(cb_up, 1);
        noc_async_read(gate.get_noc_addr(tile), get_write_ptr(cb_gate), kTileBytes);
        noc_async_read(up.get_noc_addr(tile), get_write_ptr(cb_up), kTileBytes);
        noc_async_read_barrier();
        cb_push_back(cb_gate, 1);
        cb_push_back(cb_up, 1);
    }
}
