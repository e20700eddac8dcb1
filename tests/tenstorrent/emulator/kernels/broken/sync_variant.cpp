// SPDX-License-Identifier: Apache-2.0
// Two or more cores and one mistake in how they meet, chosen by a definition. Semaphores 0 and 1.
// common args: x and y of the first and of the last core, a tensor's address. args: core, cores.
#include "api/dataflow/dataflow_api.h"

void kernel_main() {
    const uint32_t x0 = get_common_arg_val<uint32_t>(0), y0 = get_common_arg_val<uint32_t>(1);
    const uint32_t x1 = get_common_arg_val<uint32_t>(2), y1 = get_common_arg_val<uint32_t>(3);
    const uint32_t me = get_arg_val<uint32_t>(0), cores = get_arg_val<uint32_t>(1);
    auto* semaphore = reinterpret_cast<volatile tt_l1_ptr uint32_t*>(get_semaphore(0));
    const uint32_t page = get_write_ptr(0);
    auto* word = reinterpret_cast<volatile tt_l1_ptr uint32_t*>(static_cast<uintptr_t>(page));
#if defined(CROSSED)
    // everyone waits before anyone signals
    noc_semaphore_wait(semaphore, 1);
    noc_semaphore_inc(get_noc_addr(me == 0 ? x1 : x0, me == 0 ? y1 : y0, get_semaphore(0)), 1);
    noc_async_atomic_barrier();
#elif defined(POLLS)
    while (*semaphore != 7) {
    }
#elif defined(WRONG_COUNT)
    if (me == 0) {
        *word = 1;
        noc_async_write_multicast(page, get_noc_multicast_addr(x0, y0, x1, y1, page), 16, cores);
        noc_async_write_barrier();
    }
#elif defined(WRONG_CORNERS)
    if (me == 0) {
        *word = 1;
        noc_async_write_multicast(page, get_noc_multicast_addr(x1, y1, x0, y0, page), 16, cores - 1);
        noc_async_write_barrier();
    }
#elif defined(NO_SUCH_CORE)
    *word = 1;
    noc_async_write(page, get_noc_addr(62, 62, page), 16);
    noc_async_write_barrier();
#elif defined(SIGNALS_TOO_EARLY) || defined(SIGNALS_IN_TIME)
    // the data goes by multicast, the signal by a unicast increment: without a barrier it may overtake the
    // data
    if (me == 0) {
        for (uint32_t i = 0; i < 4; i++) {
            word[i] = 5;
        }
        noc_async_write_multicast(page, get_noc_multicast_addr(x0, y0, x1, y1, page), 16, cores - 1);
#if defined(SIGNALS_IN_TIME)
        noc_async_write_barrier();
#endif
        noc_semaphore_inc(get_noc_addr(x1, y1, get_semaphore(0)), 1);
        noc_async_atomic_barrier();
        noc_async_write_barrier();
    } else if (me == cores - 1) {
        noc_semaphore_wait(semaphore, 1);
        if (*word != 5) {
            noc_semaphore_set(semaphore, 0);
        }
    }
#elif defined(NO_ATOMIC_BARRIER)
    noc_semaphore_inc(get_noc_addr(x0, y0, get_semaphore(0)), 1);
#elif defined(FIRST_COMES_FIRST)
    // whether core 0 sees 1 depends on who comes first
    if (me == 0) {
        noc_semaphore_wait(semaphore, 1);
    } else {
        noc_semaphore_inc(get_noc_addr(x0, y0, get_semaphore(0)), me);
        noc_async_atomic_barrier();
    }
#elif defined(TELLS) || defined(READS_UNTOLD) || defined(READS_BEFORE_IT_WAITS) || defined(WRITES_UNTOLD)
    // core 0 fills its page, the last core reads it, core 0 fills it again
    if (me == 0) {
        word[0] = 1;
        noc_semaphore_inc(get_noc_addr(x1, y1, get_semaphore(0)), 1);
#if !defined(WRITES_UNTOLD)
        noc_semaphore_wait(semaphore, 1);
#endif
        word[0] = 2;
        noc_async_atomic_barrier();
    } else if (me == cores - 1) {
#if defined(READS_BEFORE_IT_WAITS)
        noc_async_read(get_noc_addr(x0, y0, page), page, 16);
#endif
#if !defined(READS_UNTOLD)
        noc_semaphore_wait(semaphore, 1);
#endif
#if !defined(READS_BEFORE_IT_WAITS)
        noc_async_read(get_noc_addr(x0, y0, page), page, 16);
#endif
        noc_async_read_barrier();
        noc_semaphore_inc(get_noc_addr(x0, y0, get_semaphore(0)), 1);
        noc_async_atomic_barrier();
    }
#elif defined(DRAM_TELLS) || defined(DRAM_UNTOLD)
    // core 0 writes a page of the tensor, the last core reads it
    const auto tensor = TensorAccessor(TensorAccessorArgs<0>(), get_common_arg_val<uint32_t>(4));
    if (me == 0) {
        word[0] = word[1] = word[2] = word[3] = 1;
        noc_async_write(page, tensor.get_noc_addr(0), 16);
        noc_async_write_barrier();
#if defined(DRAM_TELLS)
        noc_semaphore_inc(get_noc_addr(x1, y1, get_semaphore(0)), 1);
        noc_async_atomic_barrier();
#endif
    } else if (me == cores - 1) {
#if defined(DRAM_TELLS)
        noc_semaphore_wait(semaphore, 1);
#endif
        noc_async_read(tensor.get_noc_addr(0), page, 64);
        noc_async_read_barrier();
    }
#elif defined(READS_ON_OTHER_NOC)
    for (uint32_t i = 0; i < 4; i++) {
        word[i] = 5;
    }
    noc_async_read(get_noc_addr(my_x[1], my_y[1], page, 1), page + 64, 16, 1);
    noc_async_read_barrier(0);
    word[0] = word[16];
#elif defined(WRITES_WORD_OUTSIDE) || defined(SETS_OUTSIDE) || defined(SETS_ALL_OUTSIDE) || \
    defined(ADDS_OUTSIDE)
    // no buffer is that far up in the last core's L1
    constexpr uint32_t outside = 0x100000;
    if (me == 0) {
#if defined(WRITES_WORD_OUTSIDE)
        noc_inline_dw_write(get_noc_addr(x1, y1, outside), 7);
#elif defined(SETS_OUTSIDE)
        noc_semaphore_set_remote(get_semaphore(0), get_noc_addr(x1, y1, outside));
#elif defined(SETS_ALL_OUTSIDE)
        noc_semaphore_set_multicast(get_semaphore(0), get_noc_multicast_addr(x0, y0, x1, y1, outside),
                                    cores - 1);
#else
        noc_semaphore_inc_multicast(get_noc_multicast_addr(x0, y0, x1, y1, outside), 1, cores - 1);
        noc_async_atomic_barrier();
#endif
        noc_async_write_barrier();
    }
#elif defined(PLAIN_STORE)
    // not a mistake: a core may store to its own semaphore, and poll it
    if (me == 0) {
        noc_semaphore_inc(get_noc_addr(x1, y1, get_semaphore(0)), 1);
        noc_async_atomic_barrier();
    } else {
        while (*semaphore != 1) {
            invalidate_l1_cache();
        }
        *semaphore = 0;
    }
#endif
}
