// SPDX-License-Identifier: Apache-2.0
// routing, writer: the core that owns an expert joins the lists of all readers, and writes the expert's rows.
//
// | device_expert_mapping  [1, E_local]  int32  row-major, one page    in   global index of each local expert
// | num_routed_tokens      [1, E]        int32  row-major, one page    out  0 for experts of other devices
// | routed_tokens          [E, T]        int32  row-major, page = row  out  this device's experts, T_e entries
// | routed_token_weights   [E, T]        bf16   row-major, page = row  out  the same
//
// | cb_record  lists of each core (record.hpp), read from all readers
// | cb_pulled  scratch: from each reader its counts, and one expert's tokens and weights
// | cb_row     scratch: a row of tokens, a row of weights, the counts of all experts, the mapping
//
// Core 0 also writes num_routed_tokens. A core may end while owners read its lists: its L1 stays until all
// have ended.
//
// | common args  device_expert_mapping, num_routed_tokens, routed_tokens, routed_token_weights,
// |              NoC x of each column, NoC y of each row
// | args         core
#include "api/dataflow/dataflow_api.h"
#include "common/fp32.hpp"
#include "common/grid.hpp"
#include "routing/record.hpp"

namespace {

constexpr uint32_t kRowTokens = get_named_compile_time_arg_val("row_tokens");
constexpr uint32_t kMappingOffset = get_named_compile_time_arg_val("mapping_offset");
constexpr uint32_t cb_pulled = get_named_compile_time_arg_val("cb_pulled");
constexpr uint32_t cb_row = get_named_compile_time_arg_val("cb_row");
constexpr uint32_t kPulledBytes = moe::routing::kCountsBytes + 2 * moe::routing::kListBytes;

constexpr auto mapping_args = TensorAccessorArgs<0>();
constexpr auto counts_args = TensorAccessorArgs<mapping_args.next_compile_time_args_offset()>();
constexpr auto tokens_args = TensorAccessorArgs<counts_args.next_compile_time_args_offset()>();
constexpr auto weights_args = TensorAccessorArgs<tokens_args.next_compile_time_args_offset()>();

volatile uint32_t* words(uint32_t address) { return reinterpret_cast<volatile uint32_t*>(address); }

}  // namespace

void kernel_main() {
    using namespace moe::routing;
    const auto mapping = TensorAccessor(mapping_args, get_common_arg_val<uint32_t>(0));
    const auto counts_out = TensorAccessor(counts_args, get_common_arg_val<uint32_t>(1));
    const auto tokens_out = TensorAccessor(tokens_args, get_common_arg_val<uint32_t>(2));
    const auto weights_out = TensorAccessor(weights_args, get_common_arg_val<uint32_t>(3));
    const moe::Grid grid{4, kColumnsOfGrid};
    const uint32_t me = get_arg_val<uint32_t>(0);

    if (me < kOwners) {
        const uint32_t record = get_write_ptr(cb_record);
        const uint32_t pulled = get_write_ptr(cb_pulled);
        const uint32_t row_tokens = get_write_ptr(cb_row);
        const uint32_t row_weights = row_tokens + kRowTokens * 4;
        const uint32_t all_counts = row_weights + kRowTokens * 2;
        const uint32_t globals = all_counts + kMappingOffset;
        noc_async_read(mapping.get_noc_addr(0), globals, kLocalExperts * 4);
        noc_semaphore_wait_min(words(get_semaphore(kArrived)), kReaders);
        for (uint32_t reader = 0; reader < kReaders; reader++) {
            noc_async_read(grid.address(reader, record), pulled + reader * kPulledBytes, kCountsBytes);
        }
        noc_async_read_barrier();

        for (uint32_t local = me; local < kLocalExperts; local += kOwners) {
            uint32_t total = 0;
            for (uint32_t reader = 0; reader < kReaders; reader++) {
                const uint32_t from = pulled + reader * kPulledBytes;
                if (words(from)[local] != 0) {
                    noc_async_read(grid.address(reader, record + tokens_offset(local)), from + kCountsBytes,
                                   2 * kListBytes);
                    total += words(from)[local];
                }
            }
            const uint32_t global = words(globals)[local];
            if (total == 0 || global >= kExperts) {
                continue;
            }
            noc_async_read_barrier();
            uint32_t n = 0;
            for (uint32_t reader = 0; reader < kReaders; reader++) {
                const uint32_t from = pulled + reader * kPulledBytes;
                const uint32_t found = words(from)[local];
                for (uint32_t i = 0; i < found; i++, n++) {
                    words(row_tokens)[n] = words(from + kCountsBytes)[i];
                    reinterpret_cast<volatile uint16_t*>(row_weights)[n] =
                        moe::bf16_of_fp32(words(from + kCountsBytes + kListBytes)[i]);
                }
            }
            noc_async_write(row_tokens, tokens_out.get_noc_addr(global), n * 4);
            noc_async_write(row_weights, weights_out.get_noc_addr(global), n * 2);
            noc_async_write_barrier();
        }
        if (me == 0) {
            for (uint32_t e = 0; e < kExperts; e++) {
                words(all_counts)[e] = 0;
            }
            for (uint32_t local = 0; local < kLocalExperts; local++) {
                const uint32_t global = words(globals)[local];
                uint32_t total = 0;
                for (uint32_t reader = 0; reader < kReaders; reader++) {
                    total += words(pulled + reader * kPulledBytes)[local];
                }
                if (global < kExperts) {
                    words(all_counts)[global] = total;
                }
            }
            noc_async_write(all_counts, counts_out.get_noc_addr(0), kExperts * 4);
            noc_async_write_barrier();
        }
    }
}
