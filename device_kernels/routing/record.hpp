// SPDX-License-Identifier: Apache-2.0
// How a core's findings lie in its cb_record, for the reader that writes them and the writers that pull them.
#pragma once

#include <cstdint>

namespace moe::routing {

constexpr uint32_t kExperts = get_named_compile_time_arg_val("experts");
constexpr uint32_t kLocalExperts = get_named_compile_time_arg_val("local_experts");
constexpr uint32_t kShare = get_named_compile_time_arg_val("share");      // tokens of a reader
constexpr uint32_t kReaders = get_named_compile_time_arg_val("readers");  // cores 0 .. readers-1 list tokens
constexpr uint32_t kOwners = get_named_compile_time_arg_val("owners");    // cores 0 .. owners-1 write rows
constexpr uint32_t kColumnsOfGrid = get_named_compile_time_arg_val("grid_columns");
constexpr uint32_t kCountsBytes = get_named_compile_time_arg_val("counts_bytes");
constexpr uint32_t kListBytes = get_named_compile_time_arg_val("list_bytes");
constexpr uint32_t kArrived = get_named_compile_time_arg_val("sem_arrived");
constexpr uint32_t cb_record = get_named_compile_time_arg_val("cb_record");

constexpr uint32_t tokens_offset(uint32_t local) { return kCountsBytes + local * 2 * kListBytes; }
constexpr uint32_t weights_offset(uint32_t local) { return tokens_offset(local) + kListBytes; }

}  // namespace moe::routing
