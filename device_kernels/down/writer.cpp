// down, writer: streams this core's weight tiles and passes partial sums on. It keeps the sums of the columns
// that end here, a row a token, and writes them after the last expert.
//
// | weight_0  [E_local, I, H]  bf16 or bfloat8_b  tiles  in
// | out       [T, H]           bf16 or fp32       tiles  out  also in, when accumulating
//
// | cb_plan_w    schedule page                          <- reader
// | cb_w         weight tiles of one expert             -> compute; for each piece, each k: k_max pages
// | cb_part_out  partial sums to pass on                <- compute
// | cb_part_in   partial sums passed here               -> compute
// | cb_ids       a block's tokens (block_page.hpp)      <- reader
// | cb_sum       sums: for each finished column, for each 32 tokens, a tile  <- compute fills it, once
// | cb_old       sums of a block's tokens so far        -> compute; rows of cb_sum
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

namespace {

constexpr uint32_t kSumBytes = get_named_compile_time_arg_val("sum_tile_bytes");
constexpr uint32_t kOutBytes = get_named_compile_time_arg_val("out_tile_bytes");
constexpr uint32_t cb_ids = get_named_compile_time_arg_val("cb_ids");
constexpr uint32_t cb_sum = get_named_compile_time_arg_val("cb_sum");
constexpr uint32_t cb_old = get_named_compile_time_arg_val("cb_old");
constexpr uint32_t cb_new = get_named_compile_time_arg_val("cb_new");
constexpr uint32_t cb_out_in = get_named_compile_time_arg_val("cb_out_in");
constexpr uint32_t cb_done = get_named_compile_time_arg_val("cb_done");

constexpr auto weight_args = TensorAccessorArgs<0>();
constexpr auto out_args = TensorAccessorArgs<weight_args.next_compile_time_args_offset()>();

constexpr uint32_t kFaceBytes = kSumBytes / 4;
constexpr uint32_t kFaceRowBytes = kFaceBytes / 16;

// Where the left half of a tile's row starts; the right half is a face further on.
uint32_t row_offset(uint32_t row) { return (row / 16) * 2 * kFaceBytes + (row % 16) * kFaceRowBytes; }

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
    auto copy_row = [&](uint32_t from, uint32_t to) {
        noc_async_write(from, self + to, kFaceRowBytes);
        noc_async_write(from + kFaceBytes, self + to + kFaceBytes, kFaceRowBytes);
    };
    // Add a block to the sums of its tokens.
    auto add = [&](uint32_t, const Piece&) {
        if (sums == 0) {
            cb_wait_front(cb_sum, finished * token_tiles);
            sums = get_read_ptr(cb_sum);
        }
        const auto* token = reinterpret_cast<const volatile uint32_t*>(ids);
        const uint32_t rows = *reinterpret_cast<const volatile uint32_t*>(ids + kBlockCount);
        const uint32_t base = sums + column * token_tiles * kSumBytes;
        auto place = [&](uint32_t row) {
            const uint32_t t = token[row];
            return base + t / kBlockRows * kSumBytes + row_offset(t % kBlockRows);
        };
        // copied by writes to this core: a read barrier would wait for the next expert's weights as well
        cb_reserve_back(cb_old, 1);
        const uint32_t old = get_write_ptr(cb_old);
        for (uint32_t row = 0; row < kBlockRows; row++) {
            copy_row(place(row < rows ? row : rows - 1), old + row_offset(row));
        }
        noc_async_write_barrier();
        cb_push_back(cb_old, 1);
        cb_wait_front(cb_new, 1);
        const uint32_t fresh = get_read_ptr(cb_new);
        for (uint32_t row = 0; row < rows; row++) {
            copy_row(fresh + row_offset(row), place(row));
        }
        noc_async_write_barrier();
        cb_pop_front(cb_new, 1);
        column++;
    };
    auto end = [&](uint32_t) {
        if (finished != 0) {
            cb_pop_front(cb_ids, 1);
        }
    };
    each_block(plan, chain, [&](uint32_t local) { read_weights(weight, weight, local); }, begin, add, end);

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
    noc_async_write_barrier();
    noc_async_atomic_barrier();
    cb_pop_front(cb_plan_w, 1);
}
