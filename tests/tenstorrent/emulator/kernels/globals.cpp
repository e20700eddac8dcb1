// SPDX-License-Identifier: Apache-2.0
// Counts its calls in variables of its own and stores the count: every core has its own copy of them.
// common args: address. args: core.
#include "api/dataflow/dataflow_api.h"

uint32_t calls = 0;

uint32_t count() {
    static uint32_t inner = 10;
    calls++;
    return calls + ++inner;
}

void kernel_main() {
    constexpr auto target_args = TensorAccessorArgs<0>();
    const auto target = TensorAccessor(target_args, get_common_arg_val<uint32_t>(0));
    const uint32_t me = get_arg_val<uint32_t>(0);
    cb_reserve_back(0, 1);
    auto* word = reinterpret_cast<volatile tt_l1_ptr uint32_t*>(static_cast<uintptr_t>(get_write_ptr(0)));
    for (uint32_t i = 0; i < 4; i++) {
        word[i] = count();
    }
    noc_async_write(get_write_ptr(0), target.get_noc_addr(me), 16);
    noc_async_write_barrier();
}
