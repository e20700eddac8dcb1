// SPDX-License-Identifier: Apache-2.0
// down, reader: brings the activations of this device's experts to the cores that multiply them. Cores where
// a column ends also get each block's tokens and routing weights.
//
// | num_routed_tokens      [1, E]        int32  row-major, one page    in  tokens of each global expert
// | device_expert_mapping  [1, E_local]  int32  row-major, one page    in  global index of each local expert
// | routed_tokens          [E, T]        int32  row-major, page = row  in  T a multiple of 32
// | routed_token_weights   [E, T]        bf16   row-major, page = row  in
// | activations            [rows, I]     bf16   tiles                  in  an expert's rows start at multiples of 32
//
// | cb_table   scratch: counts, then mapping
// | cb_plan_c  schedule page                                          -> compute
// | cb_plan_w  schedule page                                          -> writer
// | cb_home    tiles of this core's chunks; all cores' readers read it (homes.hpp)
// | cb_x       tiles of one block that this core multiplies           -> compute; always k_max pages a block
// | cb_ids     a block's tokens, routing weights, number of tokens    -> writer, where a column ends
// | cb_sum     all sums (sums.hpp)                                    <- compute fills it, once
// | cb_old     sums of a block's tokens so far                        -> compute
// | cb_scale   a tile whose column 0 is the block's routing weights   -> compute, where a column ends
//
// | common args  num_routed_tokens, device_expert_mapping, routed_tokens, routed_token_weights, activations,
// |              max tokens of an expert, tiles of tokens, NoC x of each column, NoC y of each row
// | args         pieces.hpp
#include "api/dataflow/dataflow_api.h"
#include "common/product_reader.hpp"
#include "down/block_page.hpp"
#include "down/sums.hpp"

namespace {

constexpr uint32_t kOldPages = get_named_compile_time_arg_val("old_pages");
constexpr uint32_t cb_scale = get_named_compile_time_arg_val("cb_scale");

constexpr auto counts_args = TensorAccessorArgs<0>();
constexpr auto mapping_args = TensorAccessorArgs<counts_args.next_compile_time_args_offset()>();
constexpr auto tokens_args = TensorAccessorArgs<mapping_args.next_compile_time_args_offset()>();
constexpr auto weights_args = TensorAccessorArgs<tokens_args.next_compile_time_args_offset()>();
constexpr auto activations_args = TensorAccessorArgs<weights_args.next_compile_time_args_offset()>();

// Column 0 of a bf16 tile: 16 rows of 16 in each of its faces 0 and 2. Past the expert's tokens there are no
// weights.
void fill_column(uint32_t tile, const volatile uint16_t* weights, uint32_t count) {
    auto* element = reinterpret_cast<volatile uint16_t*>(tile);
    for (uint32_t row = 0; row < moe::kBlockRows; row++) {
        element[(row / 16) * 512 + (row % 16) * 16] = row < count ? weights[row] : uint16_t{0};
    }
}

}  // namespace

void kernel_main() {
    using namespace moe;
    const auto counts = TensorAccessor(counts_args, get_common_arg_val<uint32_t>(0));
    const auto mapping = TensorAccessor(mapping_args, get_common_arg_val<uint32_t>(1));
    const auto tokens = TensorAccessor(tokens_args, get_common_arg_val<uint32_t>(2));
    const auto weights = TensorAccessor(weights_args, get_common_arg_val<uint32_t>(3));
    const auto activations = TensorAccessor(activations_args, get_common_arg_val<uint32_t>(4));
    const Grid grid{7, kGridColumns};
    const Homes homes{get_write_ptr(cb_home), kTileBytes, kKTiles, kChunk, kChunks, kSlots, kWindow, kCores};
    const uint32_t me = get_arg_val<uint32_t>(kArgCore);
    const auto* plan = make_schedules(grid, me, counts, mapping, get_common_arg_val<uint32_t>(5));
    const uint32_t token_tiles = get_common_arg_val<uint32_t>(6);
    const uint32_t finished = finished_columns(kKTiles);

    auto read_chunk = [&](uint32_t window, uint32_t slot, uint32_t block, uint32_t q) {
        uint32_t to = homes.slot_address(window, slot);
        for (uint32_t k = 0; k < homes.chunk_tiles(q); k++, to += kTileBytes) {
            noc_async_read(activations.get_noc_addr(block * kKTiles + q * kChunk + k), to, kTileBytes);
        }
    };
    Cursor cursor{plan};
    // A block's tokens and routing weights, to the back of cb_ids, which is reserved here.
    auto read_ids = [&](uint32_t block) {
        cursor.seek(block);
        const uint32_t row = (block - cursor.first) * kBlockRows;
        const uint32_t left = cursor.tokens() - row;
        cb_reserve_back(cb_ids, 1);
        const uint32_t page = get_write_ptr(cb_ids);
        noc_async_read(tokens.get_noc_addr(cursor.global(), row * 4), page, kBlockRows * 4);
        noc_async_read(weights.get_noc_addr(cursor.global(), row * 2), page + kBlockWeights, kBlockRows * 2);
        *reinterpret_cast<volatile uint32_t*>(page + kBlockCount) = left < kBlockRows ? left : kBlockRows;
    };
    auto push_ids = [&] {
        cb_reserve_back(cb_scale, 1);
        const uint32_t page = get_write_ptr(cb_ids);
        fill_column(get_write_ptr(cb_scale), reinterpret_cast<const volatile uint16_t*>(page + kBlockWeights),
                    *reinterpret_cast<const volatile uint32_t*>(page + kBlockCount));
        cb_push_back(cb_scale, 1);
        cb_push_back(cb_ids, 1);
    };
    const uint32_t sums = get_read_ptr(cb_sum);
    // Take out the sums of the tokens of a block, for each column that ends here. The blocks of an expert
    // share no token, so only an expert's first block waits for those before it.
    auto take_sums = [&](uint32_t block, uint32_t ids) {
        if (block == 0) {
            // compute has filled them; rows of padding hold anything, so they are written once
            cb_wait_front(cb_sum, finished * token_tiles);
            cb_reserve_back(cb_old, kOldPages);
            for (uint32_t page = 0; page < kOldPages; page++) {
                noc_async_read(grid.address(me, sums), get_write_ptr(cb_old) + page * kSumBytes, kSumBytes);
            }
            noc_async_read_barrier();
        }
        if (block == cursor.first) {
            noc_semaphore_wait_min(l1_words(get_semaphore(kAdded)), block);
        }
        const uint32_t rows = *l1_words(ids + kBlockCount);
        for (uint32_t column = 0; column < finished; column++) {
            cb_reserve_back(cb_old, 1);
            const uint32_t old = get_write_ptr(cb_old);
            for (uint32_t row = 0; row < rows; row++) {
                const uint32_t to = old + row_offset(row);
                const uint64_t from = grid.address(
                    me, sums + column * token_tiles * kSumBytes + token_offset(l1_words(ids)[row]));
                noc_async_read(from, to, kFaceRowBytes);
                noc_async_read(from + kFaceBytes, to + kFaceBytes, kFaceRowBytes);
            }
            noc_async_read_barrier();
            cb_push_back(cb_old, 1);
        }
    };
    each_window(
        grid, me, plan[1], read_chunk, [](uint32_t) { noc_async_read_barrier(); }, [](uint32_t) {},
        [&](uint32_t block) {
            fetch_block(homes, grid, block);
            if (finished != 0) {
                read_ids(block);
            }
            noc_async_read_barrier();
            cb_push_back(cb_x, kKMax);
            if (finished != 0) {
                const uint32_t ids = get_write_ptr(cb_ids);
                push_ids();
                take_sums(block, ids);
            }
        });
}
