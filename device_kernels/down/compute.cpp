// SPDX-License-Identifier: Apache-2.0
// down, compute: multiplies this core's pieces. Where a column ends, it weighs each row and adds it to the
// sum of its token.
//
// | cb_plan_c    schedule page                              <- reader
// | cb_x         k_max tiles of one block                   <- reader
// | cb_w         k_max tiles of one expert                  <- writer
// | cb_part_in   partial sums from the core before          <- writer
// | cb_part_out  partial sums for the core after            -> writer
// | cb_scale     routing weights of a block, in column 0    <- reader
// | cb_old       sums of a block's tokens                   <- reader
// | cb_new       the same with the block added              -> writer
// | cb_out_in    tiles of out to add to, if accumulating    <- writer
// | cb_sum       all sums: filled here, kept by the writer, read here in the end
// | cb_done      the sums are complete                      <- writer
// | cb_out       tiles of out                               -> writer
//
// | common args  tiles of tokens, accumulate
// | args         pieces.hpp
// | DST          2 tiles
#include <cstdint>

#include "api/compute/bcast.h"
#include "api/compute/common.h"
#include "api/compute/compute_kernel_hw_startup.h"
#include "api/compute/eltwise_unary/fill.h"
#include "common/pieces.hpp"
#include "common/product.hpp"
#include "common/product_args.hpp"
#include "common/schedule.hpp"

namespace {

using namespace moe;

constexpr uint32_t cb_scale = get_named_compile_time_arg_val("cb_scale");
constexpr uint32_t cb_old = get_named_compile_time_arg_val("cb_old");
constexpr uint32_t cb_new = get_named_compile_time_arg_val("cb_new");
constexpr uint32_t cb_out_in = get_named_compile_time_arg_val("cb_out_in");
constexpr uint32_t cb_sum = get_named_compile_time_arg_val("cb_sum");
constexpr uint32_t cb_done = get_named_compile_time_arg_val("cb_done");

// Set up to copy tiles of cb to DST.
void copy_from(uint32_t cb) {
    reconfig_data_format_srca(cb);
    copy_init(cb);
}

// The sums at the start: zero, or what out holds.
void start_sums(uint32_t tiles, bool accumulate) {
    if (accumulate) {
        copy_from(cb_out_in);
    } else {
        fill_tile_init();
    }
    for (uint32_t tile = 0; tile < tiles; tile++) {
        tile_regs_acquire();
        if (accumulate) {
            cb_wait_front(cb_out_in, 1);
            copy_tile(cb_out_in, 0, 0);
            cb_pop_front(cb_out_in, 1);
        } else {
            fill_tile(0, 0.0f);
        }
        tile_regs_commit();
        tile_regs_wait();
        moe::pack_to<1>(cb_sum);
        tile_regs_release();
    }
}

// The sums at the end, to out.
void finish_sums(uint32_t tiles) {
    cb_wait_front(cb_done, 1);
    cb_wait_front(cb_sum, tiles);
    copy_from(cb_sum);
    for (uint32_t tile = 0; tile < tiles; tile++) {
        tile_regs_acquire();
        copy_tile(cb_sum, tile, 0);
        tile_regs_commit();
        tile_regs_wait();
        moe::pack_to<1>(cb_out);
        tile_regs_release();
    }
    cb_pop_front(cb_sum, tiles);
    cb_pop_front(cb_done, 1);
}

// DST[0] = DST[0] * routing weight of its row + the sum of its token
void weigh_and_add() {
    reconfig_data_format_srcb(cb_scale);
    unary_bcast_init<BroadcastType::COL>(cb_scale);
    unary_bcast<BroadcastType::COL>(cb_scale, 0, 1);
    unary_bcast_uninit<BroadcastType::COL>(cb_scale);
    mul_binary_tile_init();
    mul_binary_tile(0, 1, 0);
    cb_wait_front(cb_old, 1);
    copy_from(cb_old);
    copy_tile(cb_old, 0, 1);
    cb_pop_front(cb_old, 1);
    add_binary_tile_init();
    add_binary_tile(0, 1, 0);
}

void multiply_block(uint32_t pieces, bool any_finishes) {
    if (any_finishes) {
        cb_wait_front(cb_scale, 1);
    }
    uint32_t k = 0;
    for (uint32_t i = 0; i < pieces; i++) {
        const moe::Piece piece = moe::piece_arg(i);
        const bool finishes = piece.finishes(kKTiles);
        tile_regs_acquire();
        moe::multiply<1>(cb_x, cb_w, k, k, piece.tiles());
        k += piece.tiles();
        if (piece.continues()) {
            moe::add_partial<1>(cb_part_in);
            cb_pop_front(cb_part_in, 1);
        }
        if (finishes) {
            weigh_and_add();
        }
        tile_regs_commit();
        tile_regs_wait();
        moe::pack_to<1>(finishes ? cb_new : cb_part_out);
        tile_regs_release();
    }
    if (any_finishes) {
        cb_pop_front(cb_scale, 1);
    }
}

}  // namespace

void kernel_main() {
    const uint32_t tiles = get_common_arg_val<uint32_t>(0);
    const bool accumulate = get_common_arg_val<uint32_t>(1) != 0;
    const uint32_t pieces = get_arg_val<uint32_t>(moe::kArgPieces);
    const uint32_t finished = moe::finished_columns(kKTiles);
    compute_kernel_hw_startup<SrcOrder::Reverse>(cb_x, cb_w, cb_part_out);

    if (finished != 0) {
        start_sums(finished * tiles, accumulate);
    }
    cb_wait_front(cb_plan_c, 1);
    const uint32_t blocks = read_tile_value(cb_plan_c, 0, 1);
    uint32_t entry = 0;
    uint32_t expert_end = 0;  // first block past the present expert's
    for (uint32_t block = 0; block < blocks; block++) {
        if (block == expert_end) {
            if (entry != 0) {
                cb_pop_front(cb_w, kKMax);
            }
            const uint32_t tokens =
                read_tile_value(cb_plan_c, 0, moe::kHeaderWords + moe::kEntryWords * entry + 2);
            expert_end += moe::blocks_of(tokens);
            entry++;
            cb_wait_front(cb_w, kKMax);
        }
        cb_wait_front(cb_x, kKMax);
        multiply_block(pieces, finished != 0);
        cb_pop_front(cb_x, kKMax);
    }
    if (entry != 0) {
        cb_pop_front(cb_w, kKMax);
    }
    cb_pop_front(cb_plan_c, 1);
    if (finished != 0) {
        finish_sums(finished * tiles);
    }
}
