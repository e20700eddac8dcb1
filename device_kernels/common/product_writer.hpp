// What the writers of both products do: stream weights an expert ahead, and keep the chain of partial sums
// going.
#pragma once

#include "common/chain.hpp"
#include "common/pieces.hpp"
#include "common/product_args.hpp"
#include "common/schedule.hpp"

namespace moe {

constexpr uint32_t kWeightBytes = get_named_compile_time_arg_val("weight_tile_bytes");

inline Chain make_chain(const Grid& grid) {
    return {grid,
            get_arg_val<uint32_t>(kArgCore),
            kWeights,
            get_named_compile_time_arg_val("partial_bytes"),
            get_named_compile_time_arg_val("partial_depth"),
            cb_part_in,
            cb_part_out,
            get_named_compile_time_arg_val("sem_partial"),
            get_named_compile_time_arg_val("sem_credit"),
            get_write_ptr(cb_part_in)};
}

// Start reading an expert's tiles of this core's pieces: for each piece, for each k, one of each weight.
// weight_1 is read only if there are two.
template <class Weight0, class Weight1>
void read_weights(const Weight0& weight_0, const Weight1& weight_1, uint32_t local) {
    cb_reserve_back(cb_w, kKMax * kWeights);
    uint32_t to = get_write_ptr(cb_w);
    const uint32_t pieces = get_arg_val<uint32_t>(kArgPieces);
    for (uint32_t i = 0; i < pieces; i++) {
        const Piece piece = piece_arg(i);
        uint32_t page = (local * kKTiles + piece.begin) * kColumns + piece.column;
        for (uint32_t k = piece.begin; k < piece.end; k++, page += kColumns) {
            noc_async_read(weight_0.get_noc_addr(page), to, kWeightBytes);
            to += kWeightBytes;
            if constexpr (kWeights == 2) {
                noc_async_read(weight_1.get_noc_addr(page), to, kWeightBytes);
                to += kWeightBytes;
            }
        }
    }
}

// Go through the blocks of a schedule: read(local expert) starts reading weights; begin(block), finish(block,
// piece) for each column that this core finishes, end(block).
template <class Read, class Begin, class Finish, class End>
void each_block(const volatile uint32_t* plan, Chain& chain, Read&& read, Begin&& begin, Finish&& finish,
                End&& end) {
    const uint32_t active = plan[0];
    const uint32_t blocks = plan[1];
    const uint32_t pieces = get_arg_val<uint32_t>(kArgPieces);
    const bool continues = any_continues();
    auto entry_word = [&](uint32_t entry, uint32_t word) {
        return plan[kHeaderWords + kEntryWords * entry + word];
    };
    if (active != 0) {
        read(entry_word(0, 0));
    }
    if (continues && blocks != 0) {
        chain.invite(1);
    }
    uint32_t block = 0;
    for (uint32_t entry = 0; entry < active; entry++) {
        noc_async_read_barrier();
        cb_push_back(cb_w, kKMax * kWeights);
        if (entry + 1 < active) {
            read(entry_word(entry + 1, 0));  // on its way while this expert is worked on
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
