// SPDX-License-Identifier: Apache-2.0
// What the writers of both products do: stream weights some experts ahead, and keep the chain of partial sums
// going.
#pragma once

#include "common/chain.hpp"
#include "common/pieces.hpp"
#include "common/product_args.hpp"
#include "common/schedule.hpp"
#include "common/weights.hpp"

namespace moe {

inline Chain make_chain(const Grid& grid) {
    return {grid,
            get_arg_val<uint32_t>(kArgCore),
            get_arg_val<uint32_t>(kArgBefore),
            get_arg_val<uint32_t>(kArgAfter),
            kWeights,
            get_named_compile_time_arg_val("partial_bytes"),
            get_named_compile_time_arg_val("partial_depth"),
            cb_part_in,
            cb_part_out,
            get_named_compile_time_arg_val("sem_partial"),
            get_named_compile_time_arg_val("sem_credit"),
            get_write_ptr(cb_part_in)};
}

// Go through the blocks of a schedule: weights reads those of the experts; begin(block), finish(block, piece)
// for each column that this core finishes, end(block).
template <class Weights, class Begin, class Finish, class End>
void each_block(const volatile uint32_t* plan, Chain& chain, Weights&& weights, Begin&& begin,
                Finish&& finish, End&& end) {
    const uint32_t active = plan[0];
    const uint32_t blocks = plan[1];
    const uint32_t pieces = get_arg_val<uint32_t>(kArgPieces);
    const bool continues = any_continues();
    auto entry_word = [&](uint32_t entry, uint32_t word) {
        return plan[kHeaderWords + kEntryWords * entry + word];
    };
    for (uint32_t entry = 0; entry < active && entry < kWeightsAhead; entry++) {
        weights.start(entry, entry_word(entry, 0));
    }
    if (continues && blocks != 0) {
        chain.invite(1);
    }
    uint32_t block = 0;
    for (uint32_t entry = 0; entry < active; entry++) {
        weights.hand_on(entry);
        if (entry + kWeightsAhead < active) {
            weights.start(entry + kWeightsAhead, entry_word(entry + kWeightsAhead, 0));
        }
        for (const uint32_t stop = block + blocks_of(entry_word(entry, 2)); block < stop; block++) {
            if (continues && block + 1 < blocks) {
                chain.invite(2);
            }
            begin(block);
            for (uint32_t i = 0; i < pieces; i++) {
                const Piece piece = piece_arg(i);
                if (piece.continues()) {
                    chain.receive();
                }
                if (piece.finishes(kKTiles)) {
                    finish(block, piece);
                } else {
                    chain.send();
                }
            }
            end(block);
        }
    }
}

}  // namespace moe
