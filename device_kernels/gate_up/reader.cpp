// SPDX-License-Identifier: Apache-2.0
// gate_up, reader: brings the token rows of this device's experts to the cores that multiply them.
//
// | num_routed_tokens      [1, E]        int32  row-major, one page    in  tokens of each global expert
// | device_expert_mapping  [1, E_local]  int32  row-major, one page    in  global index of each local expert
// | routed_tokens          [E, T]        int32  row-major, page = row  in  T a multiple of 32
// | hidden                 [T, H]        bf16   row-major, page = row  in  H a multiple of 32
//
// | cb_table   scratch: counts, then mapping
// | cb_ids     scratch: tokens of one block
// | cb_plan_c  schedule page                                 -> compute
// | cb_plan_w  schedule page                                 -> writer
// | cb_rows    32 token rows of one chunk                    -> compute, which tilizes them into cb_home
// | cb_home    tiles of this core's chunks                   <- compute; all cores' readers read it (homes.hpp)
// | cb_x       tiles of one block that this core multiplies  -> compute; always k_max pages a block
//
// | common args  num_routed_tokens, device_expert_mapping, routed_tokens, hidden, max tokens of an expert,
// |              NoC x of each column, NoC y of each row
// | args         pieces.hpp
#include "api/dataflow/dataflow_api.h"
#include "common/product_reader.hpp"

namespace {

constexpr uint32_t cb_ids = get_named_compile_time_arg_val("cb_ids");
constexpr uint32_t cb_rows = get_named_compile_time_arg_val("cb_rows");
constexpr uint32_t kTileRowBytes = 64;  // 32 bf16

constexpr auto counts_args = TensorAccessorArgs<0>();
constexpr auto mapping_args = TensorAccessorArgs<counts_args.next_compile_time_args_offset()>();
constexpr auto tokens_args = TensorAccessorArgs<mapping_args.next_compile_time_args_offset()>();
constexpr auto hidden_args = TensorAccessorArgs<tokens_args.next_compile_time_args_offset()>();

}  // namespace

void kernel_main() {
    using namespace moe;
    const auto counts = TensorAccessor(counts_args, get_common_arg_val<uint32_t>(0));
    const auto mapping = TensorAccessor(mapping_args, get_common_arg_val<uint32_t>(1));
    const auto tokens = TensorAccessor(tokens_args, get_common_arg_val<uint32_t>(2));
    const auto hidden = TensorAccessor(hidden_args, get_common_arg_val<uint32_t>(3));
    const Grid grid{5, kGridColumns};
    const Homes homes{get_read_ptr(cb_home), kTileBytes, kKTiles, kChunk, kChunks, kSlots, kWindow, kCores};
    const uint32_t me = get_arg_val<uint32_t>(kArgCore);
    const auto* plan = make_schedules(grid, me, counts, mapping, get_common_arg_val<uint32_t>(4));

    Cursor cursor{plan};
    const uint32_t ids = get_write_ptr(cb_ids);
    const auto* token = reinterpret_cast<const volatile uint32_t*>(ids);
    auto gather = [&](uint32_t, uint32_t, uint32_t block, uint32_t q) {
        cursor.seek(block);
        const uint32_t row = (block - cursor.first) * kBlockRows;
        noc_async_read(tokens.get_noc_addr(cursor.global(), row * 4), ids, kBlockRows * 4);
        noc_async_read_barrier();
        const uint32_t bytes = homes.chunk_tiles(q) * kTileRowBytes;
        const uint32_t left = cursor.tokens() - row;
        uint32_t rows = left < kBlockRows ? left : kBlockRows;
        cb_reserve_back(cb_rows, kChunk);
        const uint32_t to = get_write_ptr(cb_rows);
        for (uint32_t i = 0; i < rows; i++) {
            noc_async_read(hidden.get_noc_addr(token[i], q * kChunk * kTileRowBytes), to + i * bytes, bytes);
        }
        noc_async_read_barrier();
        // rows past the expert's last token repeat those before: what they give is never used
        for (uint32_t more; rows < kBlockRows; rows += more) {
            more = rows < kBlockRows - rows ? rows : kBlockRows - rows;
            noc_async_read(grid.address(me, to), to + rows * bytes, more * bytes);
            noc_async_read_barrier();
        }
        cb_push_back(cb_rows, kChunk);
    };
    // compute pushes a half for each window; the half of the window before goes free once all cores are done
    // with it
    auto tilized = [&](uint32_t window) { cb_wait_front(cb_home, (window == 0 ? 1 : 2) * kSlots * kChunk); };
    auto free = [&](uint32_t window) {
        if (window != 0) {
            cb_pop_front(cb_home, kSlots * kChunk);
        }
    };
    each_window(grid, me, plan[1], gather, tilized, free, [&](uint32_t block) {
        fetch_block(homes, grid, block);
        noc_async_read_barrier();
        cb_push_back(cb_x, kKMax);
    });
}
