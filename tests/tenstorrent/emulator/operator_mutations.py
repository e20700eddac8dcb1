"""Mistakes in the routing, and in each operator alone."""

from __future__ import annotations

from mutation import EQUIVALENT, Mutation

FP32 = "common/fp32.hpp"
LISTING = "    for (uint32_t t = first; t < end; t++) {\n        const uint32_t at"
SIGNAL = "for (uint32_t i = 0; i < kOwners; i++) { noc_semaphore_inc(grid.address(i, get_semaphore(kArrived)), 1); }"

ROUTING = [
    Mutation(
        "routing/reader.cpp", LISTING, f"    {SIGNAL}\n{LISTING}", "signals before it has listed", "unordered-read"
    ),
    Mutation(
        "routing/reader.cpp",
        "for (uint32_t k = 0; k < kK; k++) {",
        "for (uint32_t k = kK; k-- > 0;) {",
        "sums duplicates in descending k",
        "wrong routing",
    ),
    Mutation(
        "routing/reader.cpp",
        "n != 0 && tokens[n - 1] == t",
        "n != 0 && tokens[0] == t",
        "merges with the first token only",
        "wrong routing",
    ),
    Mutation(
        "routing/reader.cpp",
        "e < kExperts ? local_of[e] : kLocalExperts",
        "local_of[e]",
        "takes ids that are no expert",
        "crash",
    ),
    Mutation(
        "routing/reader.cpp",
        "    noc_async_read_barrier();\n",
        "",
        "does not wait for ids and weights",
        "read-before-barrier",
    ),
    Mutation(
        "routing/record.hpp",
        "return tokens_offset(local) + kListBytes;",
        "return tokens_offset(local);",
        "lists weights over tokens",
        "wrong routing",
    ),
    Mutation(
        "routing/writer.cpp",
        "words(get_semaphore(kArrived)), kReaders)",
        "words(get_semaphore(kArrived)), kReaders - 1)",
        "waits for one list less",
        "unordered-read",
    ),
    Mutation(
        "routing/writer.cpp",
        "n * 2);\n            noc_async_write_barrier();",
        "n * 2);",
        "fills the next row while one is written",
        "source-overwritten",
    ),
    Mutation(
        "routing/writer.cpp", "if (me == 0) {", "if (true) {", "every owner writes num_routed_tokens", "unordered-write"
    ),
    Mutation(
        FP32,
        "if ((a & ~kFp32Sign) < (b & ~kFp32Sign)) {",
        "if ((a & ~kFp32Sign) > (b & ~kFp32Sign)) {",
        "takes the smaller exponent",
        "wrong routing",
        operator="routing",
    ),
    Mutation(
        FP32,
        "a + 0x7fffu + ((a >> 16) & 1)",
        "a + 0x8000u",
        "rounds ties to bf16 away from zero",
        "wrong routing",
        operator="routing",
    ),
]

OPERATORS = [
    # gate_up
    Mutation(
        "gate_up/compute.cpp",
        "if (kWeights == 2 && finishes) {",
        "if (kWeights == 2) {",
        "applies SiLU * mul to partial sums",
        "wrong activations",
    ),
    Mutation(
        "gate_up/compute.cpp",
        "stage(window + 1, blocks, me);",
        "stage(window, blocks, me);",
        "tilizes for a window that is done",
        "deadlock",
    ),
    Mutation(
        "gate_up/reader.cpp",
        "left < kBlockRows ? left : kBlockRows;",
        "kBlockRows;",
        "gathers rows past an expert's last token",
        "dram-out-of-range",
    ),
    Mutation(
        "gate_up/reader.cpp",
        "        noc_async_read_barrier();\n        // rows past",
        "        // rows past",
        "repeats rows that are under way",
        "read-before-barrier",
    ),
    Mutation(
        "gate_up/reader.cpp",
        "(window == 0 ? 1 : 2) * kSlots",
        "1 * kSlots",
        "does not wait for the second window's tiles",
        "pop-without-wait",
    ),
    Mutation(
        "gate_up/writer.cpp",
        "            noc_async_writes_flushed();\n",
        "",
        "gives a tile's room back before it is written",
        "pop-before-flush",
    ),
    Mutation("gate_up/writer.cpp", "    leave();\n", "", "ends with writes under way", "kernel-end"),
    # silu_mul
    Mutation(
        "silu_mul/compute.cpp",
        "copy_tile(cb_up, 0, 1);",
        "copy_tile(cb_gate, 0, 1);",
        "takes gate for up",
        "wrong product",
    ),
    Mutation(
        "silu_mul/reader.cpp",
        "        noc_async_read_barrier();\n",
        "",
        "hands on tiles that are under way",
        "push-before-barrier",
    ),
    Mutation(
        "silu_mul/writer.cpp",
        "        noc_async_write_barrier();\n",
        "",
        "gives a tile's room back before it is written",
        "pop-before-flush",
    ),
    # down
    Mutation(
        "down/block_page.hpp",
        "kBlockCount = 192",
        "kBlockCount = 0",
        "the count of tokens lies over the tokens",
        "crash",
    ),
    Mutation(
        "down/compute.cpp",
        "    cb_wait_front(cb_done, 1);\n",
        "",
        "writes the sums before they are complete",
        "pop-without-wait",
    ),
    Mutation(
        "down/compute.cpp",
        "copy_tile(cb_sum, tile, 0);",
        "copy_tile(cb_sum, 0, 0);",
        "writes the first sum everywhere",
        "wrong out",
    ),
    Mutation(
        "down/reader.cpp",
        "left < kBlockRows ? left : kBlockRows;",
        "kBlockRows;",
        "adds the rows of padding",
        "l1-out-of-range",
    ),
    Mutation(
        "down/reader.cpp",
        "row < count ? weights[row] : uint16_t{0}",
        "weights[row]",
        "weighs rows of padding",
        EQUIVALENT,
        "the writer drops these rows",
    ),
    Mutation(
        "down/reader.cpp",
        "            noc_async_read_barrier();\n            cb_push_back(cb_old, 1);",
        "            cb_push_back(cb_old, 1);",
        "hands on sums that are being copied",
        "push-before-barrier",
    ),
    Mutation(
        "down/writer.cpp",
        "        noc_async_write_barrier();\n        cb_pop_front(cb_new, 1);",
        "        cb_pop_front(cb_new, 1);",
        "gives a block's sums back before they are copied",
        "pop-before-flush",
    ),
    Mutation(
        "down/reader.cpp",
        "if (block == cursor.first) {",
        "if (false) {",
        "takes sums out before those of the expert before are back",
        "unordered-read",
    ),
    Mutation("down/writer.cpp", "block + 1);", "block + 2);", "says too soon that sums are back", "unordered-read"),
    Mutation(
        "down/sums.hpp",
        "return (row / 16) * 2 * kFaceBytes",
        "return (row / 16) * kFaceBytes",
        "takes a tile's second face for its third",
        "wrong out",
    ),
    Mutation("down/writer.cpp", "        column++;\n", "", "adds all columns to the first", "wrong out"),
]
