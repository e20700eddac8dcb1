// SPDX-License-Identifier: Apache-2.0
// How a block takes items: it claims one while it copies for the one before, and walks through them in two
// phases.
#pragma once

#include "common/copies.cuh"
#include "sm80/items.cuh"

// A block's claims, in SLOTS slots. Thread 0 claims; an item is visible to all after the next barrier.
template <int SLOTS>
struct Claims {
    const Work& work;
    Item* items;
    int item = 0;  // that is prepared next
    int claimed;   // thread 0: the item after the next
    bool pending = false, down = false;

    __device__ __forceinline__ Claims(const Work& work, Item* items) : work(work), items(items) {
        work.claim_first(items, claimed);
    }
    // Whether the next item is of this phase. If so, the one after it is claimed.
    __device__ __forceinline__ bool take(const Item& next) {
        if (next.kind == NONE || (next.kind == DOWN && !down)) return false;
        ++item;
        if (threadIdx.x == 0) {
            Item& after = items[item % SLOTS];
            work.place(after, claimed);
            claimed = work.claim();
            pending = true;
        }
        return true;
    }
    // Looks up the claimed item.
    __device__ __forceinline__ void publish() {
        if (!pending) return;
        Item& after = items[item % SLOTS];
        after.of = work.look_up(after);
        after.ready = after.kind == DOWN && work.complete(after.tile);
        pending = false;
    }
    // As Work's; a kernel may do more.
    __device__ __forceinline__ void made(int tile) const { work.made(tile); }
};

// All items of a block: gate_up items; then, when its activations are written, down items.
// start(n): the first copies of a phase whose first item is number n.
// products(n, item, done): of an item. done: a tile of whose activations the item before made a part, or -1.
template <int SLOTS, typename Loader, typename Start, typename Products>
__device__ __forceinline__ void each_item(Loader& loader, const Item* items, const Start& start,
                                          const Products& products) {
    int n = 0, done = -1;
    for (;; loader.down = true) {
        start(n);
        for (;; ++n) {
            const Item& item = items[n % SLOTS];
            if (item.kind == NONE || (item.kind == DOWN && !loader.down)) break;
            products(n, item, done);
            done = item.kind == GATE_UP ? item.tile : -1;
        }
        copies_wait<0>();
        __syncthreads();  // all of act is written
        if (done >= 0) loader.made(done);
        done = -1;
        if (items[n % SLOTS].kind == NONE) return;
    }
}
