// SPDX-License-Identifier: Apache-2.0
// What a device has to do for one routing, as every kernel of a core reads it: the experts with a token, in
// device_expert_mapping order, and their blocks of 32 rows.
//
// A schedule page holds uint32 words: [0] active experts, [1] blocks of all of them, then for each active
// expert its local index, its global index, its tokens.
#pragma once

#include <cstdint>

namespace moe {

constexpr uint32_t kBlockRows = 32;
constexpr uint32_t kHeaderWords = 2;
constexpr uint32_t kEntryWords = 3;

inline uint32_t blocks_of(uint32_t tokens) { return (tokens + kBlockRows - 1) / kBlockRows; }

// Fill a page from num_routed_tokens [E] and device_expert_mapping [E_local], both in L1. A count beyond
// max_tokens is cut to it, and a global index beyond the experts has no tokens.
//
// Nothing else of the routing is checked. The caller answers for it; `routing` makes tensors that hold it:
//   * the blocks of the device's experts are no more than a routing of T tokens with K experts each can have;
//   * of each row of routed_tokens, the first num_routed_tokens are distinct, and each is in 0 .. T - 1.
// Otherwise kernels read and write outside of the tensors.
inline void make_schedule(volatile uint32_t* page, const volatile uint32_t* counts,
                          const volatile uint32_t* mapping, uint32_t experts, uint32_t local_experts,
                          uint32_t max_tokens) {
    uint32_t active = 0;
    uint32_t blocks = 0;
    for (uint32_t local = 0; local < local_experts; local++) {
        const uint32_t global = mapping[local];
        uint32_t tokens = global < experts ? counts[global] : 0;
        tokens = tokens > max_tokens ? max_tokens : tokens;
        if (tokens != 0) {
            volatile uint32_t* entry = page + kHeaderWords + kEntryWords * active;
            entry[0] = local;
            entry[1] = global;
            entry[2] = tokens;
            active++;
            blocks += blocks_of(tokens);
        }
    }
    page[0] = active;
    page[1] = blocks;
}

inline uint32_t schedule_bytes(const volatile uint32_t* page) {
    return (kHeaderWords + kEntryWords * page[0]) * 4;
}

// Walks the blocks of a schedule in order.
struct Cursor {
    const volatile uint32_t* page;
    uint32_t entry = 0;  // active expert
    uint32_t first = 0;  // its first block

    const volatile uint32_t* word() const { return page + kHeaderWords + kEntryWords * entry; }
    uint32_t global() const { return word()[1]; }
    uint32_t tokens() const { return word()[2]; }
    uint32_t end() const { return first + blocks_of(tokens()); }

    // To the expert of a block at or after the present one.
    void seek(uint32_t block) {
        while (block >= end()) {
            first = end();
            entry++;
        }
    }
};

}  // namespace moe
