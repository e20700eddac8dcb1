// SPDX-License-Identifier: Apache-2.0
// The partial sums of a column that several cores share, passed from each core to the next (see pieces.hpp).
//
// The receiver reserves room in cb_in and gives the sender a credit; the sender writes into that room, which
// it finds at the same place of its own cb_in as all cores lay out their buffers alike, and raises `arrived`.
#pragma once

#include "common/grid.hpp"

namespace moe {

struct Chain {
    Grid grid;
    uint32_t me;
    uint32_t before;  // cores that send partial sums to this one, and get its own
    uint32_t after;
    uint32_t tiles;  // of one partial sum
    uint32_t bytes;  // of one partial sum
    uint32_t depth;  // partial sums that cb_in holds
    uint32_t cb_in;
    uint32_t cb_out;
    uint32_t arrived_id;
    uint32_t credit_id;
    uint32_t in_base;
    uint32_t sent = 0;
    uint32_t received = 0;

    // Let the core before send one more partial sum, when there is room for `ahead` of them. A core invites a
    // block ahead of the one it works on: else each block would wait for all cores of the line, one after the
    // other.
    void invite(uint32_t ahead) {
        cb_reserve_back(cb_in, ahead * tiles);
        noc_semaphore_inc(grid.address(before, get_semaphore(credit_id)), 1);
    }
    // Wait for the next one, and hand it to compute.
    void receive() {
        received++;
        noc_semaphore_wait_min(l1_words(get_semaphore(arrived_id)), received);
        cb_push_back(cb_in, tiles);
    }
    // Pass compute's next partial sum to the core after.
    void send() {
        cb_wait_front(cb_out, tiles);
        const uint32_t slot = sent % depth;
        sent++;
        noc_semaphore_wait_min(l1_words(get_semaphore(credit_id)), sent);
        noc_async_write(get_read_ptr(cb_out), grid.address(after, in_base + slot * bytes), bytes);
        noc_async_writes_flushed();  // then the signal, on the same way, arrives behind it
        noc_semaphore_inc(grid.address(after, get_semaphore(arrived_id)), 1);
        cb_pop_front(cb_out, tiles);
    }
};

}  // namespace moe
