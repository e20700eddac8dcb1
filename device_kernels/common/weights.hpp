// SPDX-License-Identifier: Apache-2.0
// The weights of a core's pieces, from DRAM to cb_w: some experts ahead of the one that is worked on.
//
// The tiles of a weight matrix [E_local, K, N] lie in the order of a line: expert by expert, column by
// column, k by k. So a piece is one stretch of the line. `run` tiles of the line are neighbours in one bank,
// the next `run` in the next bank:
//
// | tile j of the line      run r = j / run, tile j % run of it
// | run r                   bank r % banks, place r / banks of that bank
// | tiles past the last     `banks` whole runs do not fill: one tile a bank, in turn
//
// ttnn_moe/tenstorrent/weights.py puts the tiles there. A read moves what a piece has of a run.
#pragma once

#include "common/pieces.hpp"
#include "common/product_args.hpp"

namespace moe {

constexpr uint32_t kWeightBytes = get_named_compile_time_arg_val("weight_tile_bytes");
constexpr uint32_t kRun = get_named_compile_time_arg_val("weight_run");
constexpr uint32_t kBanks = get_named_compile_time_arg_val("dram_banks");
constexpr uint32_t kWeightsAhead = get_named_compile_time_arg_val("weights_ahead");  // experts under way
constexpr uint32_t kShareTiles = kKMax * kWeights;                                   // of an expert, in cb_w

#if defined(NUM_DRAM_BANKS)
static_assert(kBanks == NUM_DRAM_BANKS, "the weights lie in the order of another number of banks");
#endif

template <class Weight0, class Weight1>
class WeightStream {
  public:
    // weight_1 is read only if there are two. cb_w is empty.
    WeightStream(const Weight0& weight_0, const Weight1& weight_1)
        : weight_0_(weight_0), weight_1_(weight_1), base_(get_write_ptr(cb_w)) {}

    // Start reading the tiles of active expert `entry`: for each piece those of weight_0, then those of
    // weight_1.
    void start(uint32_t entry, uint32_t local) {
        const uint32_t waiting = entry - handed_on_ + 1;  // started, and not handed on
        cb_reserve_back(cb_w, waiting * kShareTiles);
        uint32_t to = base_ + entry % (kWeightsAhead + 1) * kShareTiles * kWeightBytes;
        if constexpr (kWeightsAhead > 1) {
            noc_async_read_set_trid(id(entry));
        }
        const uint32_t pieces = get_arg_val<uint32_t>(kArgPieces);
        for (uint32_t i = 0; i < pieces; i++) {
            const Piece piece = piece_arg(i);
            const uint32_t first = (local * kColumns + piece.column) * kKTiles + piece.begin;
            to = read(weight_0_, first, piece.tiles(), to);
            if constexpr (kWeights == 2) {
                to = read(weight_1_, first, piece.tiles(), to);
            }
        }
        if constexpr (kWeightsAhead > 1) {
            noc_async_read_set_trid(0);
        }
    }
    // Wait for the tiles of active expert `entry`, and give them to compute.
    void hand_on(uint32_t entry) {
        if constexpr (kWeightsAhead > 1) {
            noc_async_read_barrier_with_trid(id(entry));
        } else {
            noc_async_read_barrier();
        }
        cb_push_back(cb_w, kShareTiles);
        handed_on_ = entry + 1;
    }

  private:
    static uint32_t id(uint32_t entry) { return entry % kWeightsAhead + 1; }

    // Tiles [first, first + tiles) of the line to L1. Returns where the next go.
    template <class Weight>
    static uint32_t read(const Weight& weight, uint32_t first, uint32_t tiles, uint32_t to) {
        constexpr uint32_t kGroup = kRun * kBanks;
        constexpr uint32_t kGrouped = kLocalExperts * kColumns * kKTiles / kGroup * kGroup;
        for (uint32_t j = first; j < first + tiles;) {
            uint32_t page = j;
            uint32_t together = 1;
            if (j < kGrouped) {
                const uint32_t inside = j % kRun;
                const uint32_t run = j / kRun;
                page = (run / kBanks * kRun + inside) * kBanks + run % kBanks;
                together = kRun - inside < first + tiles - j ? kRun - inside : first + tiles - j;
            }
            noc_async_read(weight.get_noc_addr(page), to, together * kWeightBytes);
            to += together * kWeightBytes;
            j += together;
        }
        return to;
    }

    const Weight0& weight_0_;
    const Weight1& weight_1_;
    uint32_t base_;
    uint32_t handed_on_ = 0;
};

}  // namespace moe
