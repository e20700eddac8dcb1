// SPDX-License-Identifier: Apache-2.0
// routing, reader: each core lists, for its share of the tokens, those that go to this device's experts.
//
// | topk_ids               [T, K]        int32  row-major, page = token  in  outside 0 .. E-1: no expert
// | topk_weights           [T, K]        fp32   row-major, page = token  in
// | device_expert_mapping  [1, E_local]  int32  row-major, one page      in  global index of each local expert
//
// | cb_table   scratch: local index of each global expert, then the mapping
// | cb_input   scratch: of each token of the share its ids, then its weights; page_bytes each
// | cb_record  the lists: number of tokens of each local expert, then its tokens (uint32) and weights (fp32)
//
// Tokens are listed in ascending order. The writers of the cores that own the experts read the lists when all
// are complete. A token that names an expert more than once is listed once; its weights are summed in fp32 in
// ascending k.
//
// | common args  topk_ids, topk_weights, device_expert_mapping, T, NoC x of each column, NoC y of each row
// | args         core
#include "api/dataflow/dataflow_api.h"
#include "common/fp32.hpp"
#include "common/grid.hpp"
#include "routing/record.hpp"

namespace {

constexpr uint32_t kPageBytes = get_named_compile_time_arg_val("page_bytes");
constexpr uint32_t kK = get_named_compile_time_arg_val("k");
constexpr uint32_t kMappingOffset = get_named_compile_time_arg_val("mapping_offset");
constexpr uint32_t cb_table = get_named_compile_time_arg_val("cb_table");
constexpr uint32_t cb_input = get_named_compile_time_arg_val("cb_input");

constexpr auto ids_args = TensorAccessorArgs<0>();
constexpr auto weights_args = TensorAccessorArgs<ids_args.next_compile_time_args_offset()>();
constexpr auto mapping_args = TensorAccessorArgs<weights_args.next_compile_time_args_offset()>();

}  // namespace

void kernel_main() {
    using namespace moe::routing;
    const auto ids = TensorAccessor(ids_args, get_common_arg_val<uint32_t>(0));
    const auto weights = TensorAccessor(weights_args, get_common_arg_val<uint32_t>(1));
    const auto mapping = TensorAccessor(mapping_args, get_common_arg_val<uint32_t>(2));
    const uint32_t T = get_common_arg_val<uint32_t>(3);
    const moe::Grid grid{4, kColumnsOfGrid};
    const uint32_t me = get_arg_val<uint32_t>(0);
    if (me >= kReaders) {
        return;
    }
    const uint32_t first = me * kShare < T ? me * kShare : T;
    const uint32_t end = first + kShare < T ? first + kShare : T;

    const uint32_t table = get_write_ptr(cb_table);
    const uint32_t input = get_write_ptr(cb_input);
    noc_async_read(mapping.get_noc_addr(0), table + kMappingOffset, kLocalExperts * 4);
    for (uint32_t t = first; t < end; t++) {
        const uint32_t to = input + (t - first) * 2 * kPageBytes;
        noc_async_read(ids.get_noc_addr(t), to, kK * 4);
        noc_async_read(weights.get_noc_addr(t), to + kPageBytes, kK * 4);
    }
    auto* local_of = reinterpret_cast<volatile uint32_t*>(table);
    const auto* global_of = reinterpret_cast<const volatile uint32_t*>(table + kMappingOffset);
    const uint32_t record = get_write_ptr(cb_record);
    auto* counts = reinterpret_cast<volatile uint32_t*>(record);
    for (uint32_t e = 0; e < kExperts; e++) {
        local_of[e] = kLocalExperts;
    }
    for (uint32_t local = 0; local < kLocalExperts; local++) {
        counts[local] = 0;
    }
    noc_async_read_barrier();
    for (uint32_t local = 0; local < kLocalExperts; local++) {
        const uint32_t e = global_of[local];
        if (e < kExperts) {
            local_of[e] = local;
        }
    }

    for (uint32_t t = first; t < end; t++) {
        const uint32_t at = input + (t - first) * 2 * kPageBytes;
        const auto* id = reinterpret_cast<const volatile uint32_t*>(at);
        const auto* weight = reinterpret_cast<const volatile uint32_t*>(at + kPageBytes);
        for (uint32_t k = 0; k < kK; k++) {
            const uint32_t e = id[k];  // a negative id is a large number here
            const uint32_t local = e < kExperts ? local_of[e] : kLocalExperts;
            if (local == kLocalExperts) {
                continue;
            }
            auto* tokens = reinterpret_cast<volatile uint32_t*>(record + tokens_offset(local));
            auto* sums = reinterpret_cast<volatile uint32_t*>(record + weights_offset(local));
            const uint32_t n = counts[local];
            if (n != 0 && tokens[n - 1] == t) {
                sums[n - 1] = moe::fp32_add(sums[n - 1], weight[k]);
            } else {
                tokens[n] = t;
                sums[n] = weight[k];
                counts[local] = n + 1;
            }
        }
    }
    // tell the cores that write
    const uint32_t arrived = get_semaphore(kArrived);
    for (uint32_t owner = 0; owner < kOwners; owner++) {
        noc_semaphore_inc(grid.address(owner, arrived), 1);
    }
    noc_async_atomic_barrier();
}
