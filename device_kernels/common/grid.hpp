// SPDX-License-Identifier: Apache-2.0
// The cores of one program, as its dataflow kernels address them, multicast to all of them, and a barrier.
#pragma once

#include "api/dataflow/dataflow_api.h"

namespace moe {

inline volatile tt_l1_ptr uint32_t* l1_words(uint32_t address) {
    return reinterpret_cast<volatile tt_l1_ptr uint32_t*>(address);
}

// Core i stands in column i % columns and row i / columns; common runtime args hold the NoC x of each column
// and the NoC y of each row, from args first and first + columns on.
//
// The cores fill whole rows, and part of one more row. So they are one rectangle, or two.
struct Grid {
    uint32_t first;
    uint32_t columns;

    uint32_t x(uint32_t column) const { return get_common_arg_val<uint32_t>(first + column); }
    uint32_t y(uint32_t row) const { return get_common_arg_val<uint32_t>(first + columns + row); }
    uint64_t address(uint32_t core, uint32_t l1) const {
        return get_noc_addr(x(core % columns), y(core / columns), l1);
    }

    // The first `width` columns of rows y0 .. y1: its corners in the order in which this kernel's NoC runs.
    uint64_t rectangle(uint32_t y0, uint32_t width, uint32_t y1, uint32_t l1) const {
        return noc_index == 0 ? get_noc_multicast_addr(x(0), y(y0), x(width - 1), y(y1), l1)
                              : get_noc_multicast_addr(x(width - 1), y(y1), x(0), y(y0), l1);
    }
    // Core 0 calls send(address, receivers) for each rectangle of the first `cores` cores; receivers are
    // without core 0.
    template <class Send>
    void each_rectangle(uint32_t cores, uint32_t l1, Send&& send) const {
        const uint32_t rows = cores / columns;
        const uint32_t rest = cores % columns;
        const uint32_t whole = rows * columns;
        if (whole > 1) {
            send(rectangle(0, columns, rows - 1, l1), whole - 1);
        }
        const uint32_t others = rows == 0 ? rest - 1 : rest;
        if (rest != 0 && others != 0) {
            send(rectangle(rows, rest, rows, l1), others);
        }
    }
    // Core 0 copies bytes of its L1 to the same place of every other core.
    void multicast(uint32_t cores, uint32_t l1, uint32_t bytes) const {
        each_rectangle(cores, l1, [&](uint64_t to, uint32_t receivers) {
            noc_async_write_multicast(l1, to, bytes, receivers);
        });
    }
    // Core 0 sets a semaphore of every core. What core 0 multicast before, and flushed, arrives first.
    void tell(uint32_t cores, uint32_t semaphore, uint32_t value) const {
        noc_semaphore_set(l1_words(semaphore), value);
        each_rectangle(cores, semaphore, [&](uint64_t to, uint32_t receivers) {
            noc_semaphore_set_multicast(semaphore, to, receivers);
        });
    }
};

// Every core of the program arrives before any goes on. Core 0 counts; `round` counts the barriers from 1.
inline void barrier(const Grid& grid, uint32_t me, uint32_t cores, uint32_t arrived_id, uint32_t go_id,
                    uint32_t round) {
    const uint32_t arrived = get_semaphore(arrived_id);
    const uint32_t go = get_semaphore(go_id);
    if (me == 0) {
        noc_semaphore_wait_min(l1_words(arrived), (cores - 1) * round);
        grid.tell(cores, go, round);
    } else {
        noc_semaphore_inc(grid.address(0, arrived), 1);
        noc_semaphore_wait_min(l1_words(go), round);
    }
}

// What a kernel sent has arrived: a kernel that used the grid ends with this.
inline void leave() {
    noc_async_write_barrier();
    noc_async_atomic_barrier();
}

}  // namespace moe
