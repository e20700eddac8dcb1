// The cores of one program, as its dataflow kernels address them, and a barrier over them.
#pragma once

#include "api/dataflow/dataflow_api.h"

namespace moe {

// Core i stands in column i % columns and row i / columns; common runtime args hold the NoC x of each column
// and the NoC y of each row, from args first and first + columns on.
struct Grid {
    uint32_t first;
    uint32_t columns;

    uint64_t address(uint32_t core, uint32_t l1) const {
        const uint32_t x = get_common_arg_val<uint32_t>(first + core % columns);
        const uint32_t y = get_common_arg_val<uint32_t>(first + columns + core / columns);
        return get_noc_addr(x, y, l1);
    }
};

// Every core of the program arrives before any goes on. Core 0 counts; `round` counts the barriers from 1.
inline void barrier(const Grid& grid, uint32_t me, uint32_t cores, uint32_t arrived_id, uint32_t go_id,
                    uint32_t round) {
    const uint32_t arrived = get_semaphore(arrived_id);
    const uint32_t go = get_semaphore(go_id);
    noc_semaphore_inc(grid.address(0, arrived), 1);
    if (me == 0) {
        noc_semaphore_wait_min(reinterpret_cast<volatile tt_l1_ptr uint32_t*>(arrived), cores * round);
        for (uint32_t core = 0; core < cores; core++) {
            noc_semaphore_inc(grid.address(core, go), 1);
        }
    }
    noc_semaphore_wait_min(reinterpret_cast<volatile tt_l1_ptr uint32_t*>(go), round);
    noc_async_atomic_barrier();
}

}  // namespace moe
