// SPDX-License-Identifier: Apache-2.0
// gate_up, compute: tilizes this core's chunks and multiplies its pieces. SiLU*mul follows where a column
// ends.
//
// | weights == 2  out = silu(x Wg) * (x Wu), in DST's format up to the one rounding to bf16
// | weights == 1  out = x W, the separate gate or up step
//
// | cb_plan_c    schedule page                           <- reader
// | cb_rows      32 token rows of one chunk, row-major   <- reader
// | cb_home      their tiles, a half at a time           -> reader
// | cb_x         k_max tiles of one block                <- reader
// | cb_w         k_max * weights tiles of one expert     <- writer
// | cb_part_in   partial sums from the core before       <- writer
// | cb_part_out  partial sums for the core after         -> writer
// | cb_out       finished tiles, bf16                    -> writer
//
// | args  pieces.hpp
// | DST   2 * weights tiles
#include <cstdint>

#include "api/compute/common.h"
#include "api/compute/compute_kernel_hw_startup.h"
#include "api/compute/tilize.h"
#include "common/pieces.hpp"
#include "common/product.hpp"
#include "common/product_args.hpp"
#include "common/schedule.hpp"

namespace {

using namespace moe;

constexpr uint32_t cb_rows = get_named_compile_time_arg_val("cb_rows");

// Tilize this core's chunks of one window into the next half of its home buffer.
void stage(uint32_t window, uint32_t blocks, uint32_t me) {
    cb_reserve_back(cb_home, kSlots * kChunk);
    reconfig_data_format_srca(cb_rows);
    pack_reconfig_data_format(cb_home);
    for (uint32_t slot = 0; slot < kSlots; slot++) {
        const uint32_t unit = slot * kCores + me;
        if (unit >= kWindow * kChunks || window * kWindow + unit / kChunks >= blocks) {
            break;
        }
        const uint32_t left = kKTiles - (unit % kChunks) * kChunk;
        const uint32_t width = left < kChunk ? left : kChunk;
        cb_wait_front(cb_rows, kChunk);
        tilize_init(cb_rows, width, cb_home);
        tilize_block(cb_rows, width, cb_home, 0, slot * kChunk);
        tilize_uninit(cb_rows, cb_home);
        cb_pop_front(cb_rows, kChunk);
    }
    cb_push_back(cb_home, kSlots * kChunk);
}

void multiply_block(uint32_t pieces) {
    uint32_t k = 0;
    for (uint32_t i = 0; i < pieces; i++) {
        const moe::Piece piece = moe::piece_arg(i);
        const bool finishes = piece.finishes(kKTiles);
        tile_regs_acquire();
        moe::multiply<kWeights>(cb_x, cb_w, k, k * kWeights, piece.tiles());
        k += piece.tiles();
        if (piece.continues()) {
            moe::add_partial<kWeights>(cb_part_in);
            cb_pop_front(cb_part_in, kWeights);
        }
        if (kWeights == 2 && finishes) {
            moe::silu_mul();
        }
        tile_regs_commit();
        tile_regs_wait();
        if (finishes) {
            moe::pack_to<1>(cb_out);
        } else {
            moe::pack_to<kWeights>(cb_part_out);
        }
        tile_regs_release();
    }
}

}  // namespace

void kernel_main() {
    const uint32_t me = get_arg_val<uint32_t>(moe::kArgCore);
    const uint32_t pieces = get_arg_val<uint32_t>(moe::kArgPieces);
    compute_kernel_hw_startup<SrcOrder::Reverse>(cb_x, cb_w, cb_out);

    cb_wait_front(cb_plan_c, 1);
    const uint32_t blocks = read_tile_value(cb_plan_c, 0, 1);
    if (blocks == 0) {
        cb_pop_front(cb_plan_c, 1);
        return;
    }
    stage(0, blocks, me);
    uint32_t entry = 0;
    uint32_t expert_end = 0;  // first block past the present expert's
    for (uint32_t first = 0, window = 0; first < blocks; first += kWindow, window++) {
        if (first + kWindow < blocks) {
            stage(window + 1, blocks, me);
        }
        for (uint32_t block = first; block < first + kWindow && block < blocks; block++) {
            if (block == expert_end) {
                if (entry != 0) {
                    cb_pop_front(cb_w, kKMax * kWeights);
                }
                const uint32_t tokens =
                    read_tile_value(cb_plan_c, 0, moe::kHeaderWords + moe::kEntryWords * entry + 2);
                expert_end += moe::blocks_of(tokens);
                entry++;
                cb_wait_front(cb_w, kKMax * kWeights);
            }
            cb_wait_front(cb_x, kKMax);
            multiply_block(pieces);
            cb_pop_front(cb_x, kKMax);
        }
    }
    cb_pop_front(cb_w, kKMax * kWeights);
    cb_pop_front(cb_plan_c, 1);
}
