// SPDX-License-Identifier: Apache-2.0
// What the readers of both products do: make the schedule, keep the windows in step with all other cores,
// fetch blocks.
#pragma once

#include "common/homes.hpp"
#include "common/pieces.hpp"
#include "common/product_args.hpp"
#include "common/schedule.hpp"

namespace moe {

constexpr uint32_t kMappingOffset = get_named_compile_time_arg_val("mapping_offset");
constexpr uint32_t kArrived = get_named_compile_time_arg_val("sem_arrived");
constexpr uint32_t kGo = get_named_compile_time_arg_val("sem_go");
constexpr uint32_t kScheduled = get_named_compile_time_arg_val("sem_scheduled");
constexpr uint32_t cb_table = get_named_compile_time_arg_val("cb_table");

// Give compute and writer the schedule. Core 0 makes it of num_routed_tokens [E] and device_expert_mapping
// [E_local], a page each, and sends it to all cores.
template <class Counts, class Mapping>
const volatile uint32_t* make_schedules(const Grid& grid, uint32_t me, const Counts& counts,
                                        const Mapping& mapping, uint32_t max_tokens) {
    cb_reserve_back(cb_plan_c, 1);
    cb_reserve_back(cb_plan_w, 1);
    const uint32_t plan = get_write_ptr(cb_plan_c);
    const uint32_t made = get_semaphore(kScheduled);
    if (me == 0) {
        const uint32_t table = get_write_ptr(cb_table);
        noc_async_read(counts.get_noc_addr(0), table, kExperts * 4);
        noc_async_read(mapping.get_noc_addr(0), table + kMappingOffset, kLocalExperts * 4);
        noc_async_read_barrier();
        for (uint32_t page : {plan, get_write_ptr(cb_plan_w)}) {
            make_schedule(l1_words(page), l1_words(table), l1_words(table + kMappingOffset), kExperts,
                          kLocalExperts, max_tokens);
            grid.multicast(kCores, page, schedule_bytes(l1_words(page)));
        }
        noc_async_writes_flushed();
        grid.tell(kCores, made, 1);
    } else {
        noc_semaphore_wait_min(l1_words(made), 1);
    }
    cb_push_back(cb_plan_c, 1);
    cb_push_back(cb_plan_w, 1);
    return l1_words(plan);
}

// Go through the windows of a schedule of `blocks` blocks:
// | stage(window, slot, b, q)  bring chunk q of block b to this core's slot; for each of its slots that a window
// |                            uses
// | staged(window)             wait until all of them are there
// | free(window)               wait until every core is done with the window before this one
// | block(b)                   work on a block; its tiles can be fetched
template <class Stage, class Staged, class Free, class Block>
void each_window(const Grid& grid, uint32_t me, uint32_t blocks, Stage&& stage, Staged&& staged, Free&& free,
                 Block&& block) {
    auto stage_window = [&](uint32_t window) {
        for (uint32_t slot = 0; slot < kSlots; slot++) {
            const uint32_t unit = slot * kCores + me;
            const uint32_t b = window * kWindow + unit / kChunks;
            if (unit >= kWindow * kChunks || b >= blocks) {
                return;
            }
            stage(window, slot, b, unit % kChunks);
        }
    };
    const uint32_t windows = (blocks + kWindow - 1) / kWindow;
    if (windows != 0) {
        stage_window(0);
    }
    for (uint32_t window = 0; window < windows; window++) {
        staged(window);
        barrier(grid, me, kCores, kArrived, kGo, window + 1);
        free(window);
        if (window + 1 < windows) {
            stage_window(window + 1);
        }
        const uint32_t end = (window + 1) * kWindow < blocks ? (window + 1) * kWindow : blocks;
        for (uint32_t b = window * kWindow; b < end; b++) {
            block(b);
        }
    }
    if (windows != 0) {
        free(windows);  // others may still read it: it stays until all cores have ended
    }
    leave();
}

// Start reading the tiles of a block that this core multiplies, to the back of cb_x, which is reserved here.
inline void fetch_block(const Homes& homes, const Grid& grid, uint32_t block) {
    cb_reserve_back(cb_x, kKMax);
    uint32_t to = get_write_ptr(cb_x);
    const uint32_t pieces = get_arg_val<uint32_t>(kArgPieces);
    for (uint32_t i = 0; i < pieces; i++) {
        const Piece piece = piece_arg(i);
        homes.fetch(grid, block, piece.begin, piece.end, to);
        to += piece.tiles() * kTileBytes;
    }
}

}  // namespace moe
