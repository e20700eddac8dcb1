// SPDX-License-Identifier: Apache-2.0
// gate_up, writer: streams this core's weight tiles, passes partial sums on, writes the columns that end
// here.
//
// | weight_0  [E_local, I / 32, H, 32]  bf16, bfloat8_b, bfloat4_b  tiles  in   gate; weights.hpp has their order
// | weight_1  [E_local, I / 32, H, 32]  the same                    tiles  in   up, if weights == 2
// | out       [rows, I]                 bf16                        tiles  out  an expert's rows start at multiples of 32
//
// | cb_plan_w    schedule page             <- reader
// | cb_w         weight tiles of an expert -> compute; for each piece those of weight_0, then of weight_1: k_max * weights
// | cb_part_out  partial sums to pass on   <- compute
// | cb_part_in   partial sums passed here  -> compute
// | cb_out       finished tiles            <- compute
//
// | common args  weight_0, weight_1, out, NoC x of each column, NoC y of each row
// | args         pieces.hpp
#include "api/dataflow/dataflow_api.h"
#include "common/product_writer.hpp"

namespace {

constexpr auto weight_0_args = TensorAccessorArgs<0>();
constexpr auto weight_1_args = TensorAccessorArgs<weight_0_args.next_compile_time_args_offset()>();
constexpr auto out_args = TensorAccessorArgs<weight_1_args.next_compile_time_args_offset()>();

}  // namespace

void kernel_main() {
    using namespace moe;
    const auto weight_0 = TensorAccessor(weight_0_args, get_common_arg_val<uint32_t>(0));
    const auto weight_1 = TensorAccessor(weight_1_args, get_common_arg_val<uint32_t>(1));
    const auto out = TensorAccessor(out_args, get_common_arg_val<uint32_t>(2));
    const Grid grid{3, kGridColumns};
    Chain chain = make_chain(grid);

    cb_wait_front(cb_plan_w, 1);
    const auto* plan = reinterpret_cast<const volatile uint32_t*>(get_read_ptr(cb_plan_w));
    WeightStream stream(weight_0, weight_1);
    each_block(
        plan, chain, stream, [](uint32_t) {},
        [&](uint32_t block, const Piece& piece) {
            cb_wait_front(cb_out, 1);
            noc_async_write(get_read_ptr(cb_out), out.get_noc_addr(block * kColumns + piece.column),
                            kTileBytes);
            noc_async_writes_flushed();
            cb_pop_front(cb_out, 1);
        },
        [](uint32_t) {});
    leave();
    cb_pop_front(cb_plan_w, 1);
}
