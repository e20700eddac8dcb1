// SPDX-License-Identifier: Apache-2.0
// down, writer: streams this core's weight tiles and passes partial sums on. It keeps the sums of the columns
// that end here, a row a token, and writes them after the last expert.
//
// | weight_0  [E_local, H / 32, I, 32]  bf16, bfloat8_b, bfloat4_b  tiles  in   weights.hpp has their order
// | out       [T, H]                    bf16 or fp32                tiles  out  also in, when accumulating
//
// | cb_plan_w    schedule page                          <- reader
// | cb_w         weight tiles of one expert             -> compute; for each piece, each k: k_max pages
// | cb_part_out  partial sums to pass on                <- compute
// | cb_part_in   partial sums passed here               -> compute
// | cb_ids       a block's tokens (block_page.hpp)      <- reader
// | cb_sum       sums: for each finished column, for each 32 tokens, a tile  <- compute fills it, once
// | cb_new       the same with the block added          <- compute; they go back to cb_sum
// | cb_out_in    tiles of out to add to                 -> compute
// | cb_done      one page: all blocks are in the sums   -> compute
// | cb_out       tiles of out                           <- compute
//
// One core owns a column for all tokens, and takes the blocks in order. So experts that share a token never
// race, and sums have the order of device_expert_mapping.
//
// | common args  weight_0, out, tiles of tokens, accumulate, NoC x of each column, NoC y of each row
// | args         pieces.hpp
#include "api/dataflow/dataflow_api.h"
#include "common/product_writer.hpp"
#include "down/block_page.hpp"
#include "down/sums.hpp"

namespace {

constexpr uint32_t kOutBytes = get_named_compile_time_arg_val("out_tile_bytes");
constexpr uint32_t cb_new = get_named_compile_time_arg_val("cb_new");
constexpr uint32_t cb_out_in = get_named_compile_time_arg_val("cb_out_in");
constexpr uint32_t cb_done = get_named_compile_time_arg_val("cb_done");

constexpr auto weight_args = TensorAccessorArgs<0>();
constexpr auto out_args = TensorAccessorArgs<weight_args.next_compile_time_args_offset()>();

}  // namespace

void kernel_main() {
    using namespace moe;
    const auto weight = TensorAccessor(weight_args, get_common_arg_val<uint32_t>(0));
    const auto out = TensorAccessor(out_args, get_common_arg_val<uint32_t>(1));
    const uint32_t token_tiles = get_common_arg_val<uint32_t>(2);
    const bool accumulate = get_common_arg_val<uint32_t>(3) != 0;
    const Grid grid{4, kGridColumns};
    const uint32_t finished = finished_columns(kKTiles);
    Chain chain = make_chain(grid);

    // Each tile of out that this core owns, in the order of cb_sum.
    auto each_out_tile = [&](auto&& act) {
        for (uint32_t i = 0; i < get_arg_val<uint32_t>(kArgPieces); i++) {
            const Piece piece = piece_arg(i);
            if (piece.finishes(kKTiles)) {
                for (uint32_t tile = 0; tile < token_tiles; tile++) {
                    act(out.get_noc_addr(tile * kColumns + piece.column));
                }
            }
        }
    };
    if (accumulate) {
        each_out_tile([&](uint64_t address) {
            cb_reserve_back(cb_out_in, 1);
            noc_async_read(address, get_write_ptr(cb_out_in), kOutBytes);
            noc_async_read_barrier();
            cb_push_back(cb_out_in, 1);
        });
    }
    cb_wait_front(cb_plan_w, 1);
    const auto* plan = reinterpret_cast<const volatile uint32_t*>(get_read_ptr(cb_plan_w));

    uint32_t sums = 0;    // cb_sum, once compute has filled it
    uint32_t ids = 0;     // the block's page
    uint32_t column = 0;  // of those that this core finishes
    auto begin = [&](uint32_t) {
        column = 0;
        if (finished != 0) {
            cb_wait_front(cb_ids, 1);
            ids = get_read_ptr(cb_ids);
        }
    };
    const uint64_t self = grid.address(chain.me, 0);
    // Put the sums of a block's tokens back, with the block added.
    auto add = [&](uint32_t, const Piece&) {
        if (sums == 0) {
            cb_wait_front(cb_sum, finished * token_tiles);
            sums = get_read_ptr(cb_sum);
        }
        const auto* token = l1_words(ids);
        const uint32_t rows = *l1_words(ids + kBlockCount);
        const uint32_t base = sums + column * token_tiles * kSumBytes;
        cb_wait_front(cb_new, 1);
        const uint32_t fresh = get_read_ptr(cb_new);
        for (uint32_t row = 0; row < rows; row++) {
            const uint32_t from = fresh + row_offset(row);
            const uint64_t to = self + base + token_offset(token[row]);
            noc_async_write(from, to, kFaceRowBytes);
            noc_async_write(from + kFaceBytes, to + kFaceBytes, kFaceRowBytes);
        }
        noc_async_write_barrier();
        cb_pop_front(cb_new, 1);
        column++;
    };
    auto end = [&](uint32_t block) {
        if (finished != 0) {
            cb_pop_front(cb_ids, 1);
            noc_semaphore_set(l1_words(get_semaphore(kAdded)), block + 1);
        }
    };
    WeightStream stream(weight, weight);
    each_block(plan, chain, stream, begin, add, end);

    if (finished != 0) {
        cb_reserve_back(cb_done, 1);
        cb_push_back(cb_done, 1);
        each_out_tile([&](uint64_t address) {
            cb_wait_front(cb_out, 1);
            noc_async_write(get_read_ptr(cb_out), address, kOutBytes);
            noc_async_writes_flushed();
            cb_pop_front(cb_out, 1);
        });
    }
    leave();
    cb_pop_front(cb_plan_w, 1);
}
