"""Mistakes of one line in the device kernels, and what finds each. Run it for docs/emulator.md's table.

test_mutations.py applies each to a copy of the kernels and runs the operator on emulated cores.
"""

from __future__ import annotations

from dataclasses import dataclass

EQUIVALENT = "equivalent"


@dataclass(frozen=True)
class Mutation:
    """A mistake.

    Attributes:
        file: below device_kernels. old, new: the text, which the file holds once, and what replaces it.
        mistake: in words.
        found: a kind of finding; "wrong OUTPUT"; "more COUNTER"; or "equivalent".
        reason: why it is equivalent.
        operator: that is run; default: the folder of the file.
    """

    file: str
    old: str
    new: str
    mistake: str
    found: str
    reason: str = ""
    operator: str = ""

    @property
    def runs(self) -> str:
        return self.operator or self.file.split("/")[0]


CHAIN, GRID, HOMES, PIECES = (f"common/{name}.hpp" for name in ("chain", "grid", "homes", "pieces"))
FP32, PRODUCT, ARGS, SCHEDULE = (f"common/{name}.hpp" for name in ("fp32", "product", "product_args", "schedule"))
READER, WRITER, WEIGHTS = (f"common/{name}.hpp" for name in ("product_reader", "product_writer", "weights"))
LISTING = "    for (uint32_t t = first; t < end; t++) {\n        const uint32_t at"
SIGNAL = "for (uint32_t i = 0; i < kOwners; i++) { noc_semaphore_inc(grid.address(i, get_semaphore(kArrived)), 1); }"

MUTATIONS = [
    # routing
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
    # both products
    Mutation(
        GRID,
        "(cores - 1) * round)",
        "(cores - 1) * round - 1)",
        "the barrier waits for one core less",
        "unordered-read",
        operator="gate_up",
    ),
    Mutation(
        GRID,
        "l1_words(go), round)",
        "l1_words(go), round - 1)",
        "the barrier is one round late",
        "unordered-read",
        operator="down",
    ),
    Mutation(
        HOMES,
        "((window_index & 1) * slots + slot)",
        "(slot)",
        "both windows lie in one half",
        "wrong activations",
        operator="gate_up",
    ),
    Mutation(
        HOMES,
        "return left < chunk ? left : chunk;",
        "return chunk;",
        "the last chunk is a whole one",
        "dram-out-of-range",
        operator="gate_up",
    ),
    Mutation(
        HOMES,
        "(q + 1) * chunk < end",
        "(q + 1) * chunk <= end",
        "ends a part at the chunk's end",
        EQUIVALENT,
        "where the two are equal, so are both values",
        operator="gate_up",
    ),
    Mutation(
        READER,
        "kArrived, kGo, window + 1)",
        "kArrived, kGo, window)",
        "the first window has no barrier",
        "unordered-read",
        operator="gate_up",
    ),
    Mutation(
        READER,
        "kLocalExperts * 4);\n        noc_async_read_barrier();",
        "kLocalExperts * 4);",
        "makes the schedule of counts that are under way",
        "read-before-barrier",
        operator="down",
    ),
    Mutation(
        READER,
        "    cb_reserve_back(cb_x, kKMax);\n",
        "",
        "fetches a block over one in use",
        "push-without-reserve",
        operator="down",
    ),
    Mutation(
        WEIGHTS,
        " * kKTiles + piece.begin;",
        " * kKTiles;",
        "each piece has the weights of the column's start",
        "wrong activations",
        operator="gate_up",
    ),
    Mutation(
        WEIGHTS,
        "with_trid(id(entry))",
        "with_trid(id(entry + 1))",
        "hands on weights that are under way",
        "push-before-barrier",
        operator="down",
    ),
    Mutation(
        WRITER,
        "chain.invite(2);",
        "chain.invite(1);",
        "invites a block without room for it",
        "push-without-reserve",
        operator="gate_up",
    ),
    Mutation(
        CHAIN,
        "get_semaphore(credit_id)), sent);",
        "get_semaphore(credit_id)), sent - 1);",
        "sends a partial sum ahead of its invitation",
        "unordered-write",
        operator="gate_up",
    ),
    Mutation(
        CHAIN,
        "get_semaphore(arrived_id)), received);",
        "get_semaphore(arrived_id)), received - 1);",
        "takes a partial sum before it has come",
        "unordered-read",
        operator="gate_up",
    ),
    Mutation(
        CHAIN,
        "        noc_async_writes_flushed();",
        "",
        "gives a partial sum's room back before it is sent",
        "pop-before-flush",
        operator="gate_up",
    ),
    Mutation(
        CHAIN,
        "const uint32_t slot = sent % depth;",
        "const uint32_t slot = 0;",
        "sends every partial sum to one place",
        "unordered-write",
        operator="gate_up",
    ),
    Mutation(
        PIECES,
        "return begin != 0; }",
        "return true; }",
        "waits for a partial sum that nobody sends",
        "deadlock",
        operator="gate_up",
    ),
    Mutation(
        PIECES,
        "found += piece_arg(i)",
        "found = piece_arg(i)",
        "counts one column where a core finishes several",
        "deadlock",
        operator="down",
    ),
    Mutation(
        PRODUCT,
        "w0 + i * tiles + k",
        "w0 + k",
        "multiplies by gate where up belongs",
        "wrong activations",
        operator="gate_up",
    ),
    Mutation(
        PRODUCT,
        "    reconfig_data_format_srca(cb_in);\n",
        "",
        "unpacks a partial sum as bf16",
        "mismatched-format",
        operator="gate_up",
    ),
    Mutation(
        PRODUCT,
        "cb_wait_front(cb_in, width);",
        "cb_wait_front(cb_in, 1);",
        "waits for half a partial sum",
        "tile-not-waited-for",
        operator="gate_up",
    ),
    Mutation(
        ARGS, "kTileBytes = 2048", "kTileBytes = 1024", "moves half a tile", "uninitialised-read", operator="down"
    ),
    Mutation(
        SCHEDULE, "(tokens + kBlockRows - 1)", "(tokens)", "drops an expert's last block", "wrong out", operator="down"
    ),
    Mutation(
        SCHEDULE,
        "if (tokens != 0) {",
        "if (true) {",
        "reads the weights of idle experts",
        "more dram_read_bytes",
        operator="gate_up",
    ),
    Mutation(
        SCHEDULE,
        "tokens = tokens > max_tokens ? max_tokens : tokens;",
        "",
        "trusts the counts",
        EQUIVALENT,
        "routing never counts more than T; the line is for input that is none of its",
        operator="down",
    ),
    Mutation(
        GRID,
        "rows - 1), l1), whole - 1);",
        "rows - 1), l1), whole);",
        "counts the sender among the receivers of a multicast",
        "multicast-receivers",
        operator="gate_up",
    ),
    Mutation(
        GRID,
        "x(columns - 1), y(rows - 1)",
        "x(columns - 2), y(rows - 1)",
        "the rectangle of a multicast lacks a column",
        "multicast-receivers",
        operator="gate_up",
    ),
    Mutation(
        GRID,
        "get_noc_multicast_addr(x(0), y(0), x(columns - 1), y(rows - 1), l1)",
        "get_noc_multicast_addr(x(columns - 1), y(rows - 1), x(0), y(0), l1)",
        "the rectangle of a multicast has the corners of NoC 1",
        "multicast-rectangle",
        operator="down",
    ),
    Mutation(
        GRID,
        "        noc_semaphore_set(l1_words(semaphore), value);\n",
        "",
        "multicasts a semaphore that it has not set",
        "deadlock",
        operator="gate_up",
    ),
    Mutation(
        GRID,
        "    noc_async_atomic_barrier();\n",
        "",
        "ends with increments under way",
        "kernel-end",
        operator="gate_up",
    ),
    Mutation(
        READER,
        "        noc_async_writes_flushed();\n",
        "",
        "signals a schedule that may come later than its signal",
        "read-before-barrier",
        operator="gate_up",
    ),
    Mutation(
        READER,
        "        noc_semaphore_wait_min(l1_words(made), 1);",
        "",
        "does not wait for the schedule",
        "uninitialised-read",
        operator="down",
    ),
    Mutation(
        WEIGHTS,
        "            noc_async_read_set_trid(0);\n",
        "",
        "leaves its transaction id set",
        "transaction-id",
        operator="gate_up",
    ),
    Mutation(
        WEIGHTS,
        "entry % (kWeightsAhead + 1) * kShareTiles",
        "entry % kWeightsAhead * kShareTiles",
        "reads an expert's weights over those in use",
        "wrong out",
        operator="down",
    ),
    Mutation(
        WEIGHTS,
        "(run / kBanks * kRun + inside) * kBanks",
        "(run / kBanks + inside) * kBanks",
        "takes a run's place for its group's",
        "wrong activations",
        operator="gate_up",
    ),
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


def table() -> str:
    """The rows of docs/emulator.md."""
    rows = [
        f"| `{m.file}` | {m.mistake} | {f'equivalent: {m.reason}' if m.found == EQUIVALENT else m.found} |"
        for m in MUTATIONS
    ]
    return "\n".join(["| file | mistake | found by |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
