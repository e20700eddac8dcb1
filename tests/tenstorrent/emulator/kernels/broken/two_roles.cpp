// SPDX-License-Identifier: Apache-2.0
// Reader and writer store to one word of L1: at any time with RACES, one after the other with TAKES_TURNS.
#include "api/dataflow/dataflow_api.h"

void kernel_main() {
#if defined(COMPILE_FOR_NCRISC)
    auto* word = reinterpret_cast<volatile tt_l1_ptr uint32_t*>(static_cast<uintptr_t>(get_write_ptr(0)));
#if defined(TAKES_TURNS)
    cb_reserve_back(0, 1);
#endif
    *word = 1;
#if defined(TAKES_TURNS)
    cb_push_back(0, 1);
#endif
#else
    auto* word = reinterpret_cast<volatile tt_l1_ptr uint32_t*>(static_cast<uintptr_t>(get_read_ptr(0)));
#if defined(TAKES_TURNS)
    cb_wait_front(0, 1);
#endif
    *word = 2;
#if defined(TAKES_TURNS)
    cb_pop_front(0, 1);
#endif
#endif
}
