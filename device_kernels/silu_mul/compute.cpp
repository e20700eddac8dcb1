// SPDX-License-Identifier: Apache-2.0
// silu_mul, compute: out = silu(gate) * up, in DST's format up to the one rounding to bf16.
//
// | cb_gate, cb_up  one tile at a time  <- reader
// | cb_out          one tile at a time  -> writer
//
// | args  first, end
// | DST   2 tiles
#include <cstdint>

#include "api/compute/common.h"
#include "api/compute/compute_kernel_hw_startup.h"
#include "common/product.hpp"

namespace {

constexpr uint32_t cb_gate = get_named_compile_time_arg_val("cb_gate");
constexpr uint32_t cb_up = get_named_compile_time_arg_val("cb_up");
constexpr uint32_t cb_out = get_named_compile_time_arg_val("cb_out");

}  // namespace

void kernel_main() {
    compute_kernel_hw_startup(cb_gate, cb_out);
    copy_init(cb_gate);
    const uint32_t end = get_arg_val<uint32_t>(1);
    for (uint32_t tile = get_arg_val<uint32_t>(0); tile < end; tile++) {
        cb_wait_front(cb_gate, 1);
        cb_wait_front(cb_up, 1);
        tile_regs_acquire();
        copy_tile(cb_gate, 0, 0);
        copy_tile(cb_up, 0, 1);
        moe::silu_mul();
        tile_regs_commit();
        cb_pop_front(cb_gate, 1);
        cb_pop_front(cb_up, 1);
        tile_regs_wait();
        moe::pack_to<1>(cb_out);
        tile_regs_release();
    }
}
