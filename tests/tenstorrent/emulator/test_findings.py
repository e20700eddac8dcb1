"""Each rule of the hardware that the emulator knows, broken by a kernel made for it; and the kernel repaired."""

from __future__ import annotations

import time

import pytest
import torch
from programs import KERNELS, buffer, corners, grid, moved, shares, unary

from ttnn_moe.tenstorrent.emulator import (
    CircularBuffer,
    EmulatedChip,
    EmulationError,
    Kernel,
    Program,
    Result,
    Semaphore,
    build,
    dram,
    run,
)

TILES = 6


def emulate(program: Program, chip: str = "p150", **tensors) -> Result:
    device = EmulatedChip(chip)
    a = device.tensor(torch.arange(TILES * 1024).reshape(TILES * 32, 32).bfloat16())
    out = device.empty((TILES * 32, 32), "bfloat16")
    return run(program, device, {"a": a, "out": out}, root=KERNELS, check=False)


def kinds(result: Result) -> set[str]:
    return {finding.kind for finding in result.findings}


def variant(file: str, define: str, value: int = 16, **more) -> Program:
    """The unary program with one kernel replaced by a broken one."""
    role = {"reader": "reader", "writer": "writer", "unary": "compute"}[file.split("_")[0]]
    program = unary(TILES, grid(1), silu=True, **{role: f"broken/{file}"}, **more)
    for kernel in program.kernels:
        if kernel.role == role:
            kernel.defines = {**kernel.defines, define: str(value)}
    return program


def test_nothing_is_found_in_kernels_that_keep_the_rules():
    assert emulate(unary(TILES, grid(2))).findings == []
    # the variants without a definition are the same kernels
    for file in ("reader_variant.cpp", "writer_variant.cpp", "unary_variant.cpp"):
        assert emulate(variant(file, "NO_MISTAKE")).findings == []


@pytest.mark.parametrize(
    "file, define, kind",
    [
        ("reader_no_barrier.cpp", "", "push-before-barrier"),
        ("reader_no_barrier.cpp", "", "read-before-barrier"),
        ("reader_peeks.cpp", "", "read-before-barrier"),
        ("reader_variant.cpp", "NEVER_WAITS", "push-before-barrier"),
        ("reader_variant.cpp", "NEVER_WAITS", "kernel-end"),
        ("reader_variant.cpp", "NO_RESERVE", "push-without-reserve"),
        ("reader_variant.cpp", "NO_RESERVE", "push-past-capacity"),
        ("reader_variant.cpp", "PUSH_TWICE", "push-without-reserve"),
        ("reader_variant.cpp", "ONE_MORE", "push-pop-mismatch"),
        ("reader_variant.cpp", "RESERVE_TOO_MANY", "never-fits"),
        ("reader_variant.cpp", "UNALIGNED", "unaligned-noc-address"),
        ("reader_variant.cpp", "PAST_THE_END", "dram-out-of-range"),
        ("reader_variant.cpp", "TOO_LONG", "l1-out-of-range"),
        ("reader_variant.cpp", "OUTSIDE_L1", "l1-out-of-range"),
        ("reader_variant.cpp", "TWICE", "write-before-barrier"),
        ("reader_variant.cpp", "FOREIGN_STORE", "foreign-l1"),
        ("writer_variant.cpp", "NO_WAIT", "pop-without-wait"),
        ("writer_variant.cpp", "NO_FLUSH", "pop-before-flush"),
        ("writer_variant.cpp", "OVERWRITES", "source-overwritten"),
        ("writer_variant.cpp", "POP_TWICE", "pop-without-wait"),
        ("writer_variant.cpp", "NO_BARRIER", "kernel-end"),
        ("unary_variant.cpp", "NO_STARTUP", "missing-init"),
        ("unary_variant.cpp", "NO_INIT", "missing-init"),
        ("unary_variant.cpp", "OTHER_INIT", "missing-init"),
        ("unary_variant.cpp", "NO_SILU_INIT", "missing-init"),
        ("unary_variant.cpp", "UNTILIZES", "missing-init"),
        ("unary_variant.cpp", "NO_WAIT", "tile-not-waited-for"),
        ("unary_variant.cpp", "SECOND_TILE", "tile-not-waited-for"),
        ("unary_variant.cpp", "NO_RESERVE", "pack-without-reserve"),
        ("unary_variant.cpp", "NO_ACQUIRE", "dst-not-acquired"),
        ("unary_variant.cpp", "NO_COMMIT", "dst-not-waited"),
        ("unary_variant.cpp", "NO_RELEASE", "dst-order"),
        ("unary_variant.cpp", "NO_COPY", "uninitialised-dst"),
        ("unary_variant.cpp", "BEYOND_DST", "dst-capacity"),
    ],
)
def test_finds(file, define, kind):
    result = emulate(variant(file, define or "NO_MISTAKE"))
    assert kind in kinds(result), [str(finding) for finding in result.findings]
    finding = next(finding for finding in result.findings if finding.kind == kind)
    if kind != "push-pop-mismatch":
        assert finding.place.startswith(("broken/", "unary.cpp", "write_tiles.cpp")), finding
        assert int(finding.place.rsplit(":", 1)[1]) > 1


def test_bytes_read_too_early_are_poison():
    """Not only reported: what the tile then holds is nothing that was ever in DRAM."""
    device = EmulatedChip()
    a, out = device.tensor(torch.ones(32, 32).bfloat16()), device.empty((32, 32), "bfloat16")
    program = unary(1, grid(1), reader="broken/reader_no_barrier.cpp")
    assert run(program, device, {"a": a, "out": out}, root=KERNELS, check=False).findings
    assert out.read().isnan().all()


def test_poison_is_no_number_in_any_format():
    assert f"kPoison = 0x{dram._POISON:X};" in (build.sources() / "engine" / "machine.hpp").read_text()
    word = torch.tensor([int(dram._POISON) - (1 << 32)], dtype=torch.int32)
    assert word.view(torch.bfloat16).isnan().all() and word.view(torch.float32).isnan().all()


def test_a_page_of_the_last_row_that_its_tensor_lacks():
    """7 pages on 8 banks: page 7 has an address like any other, in a bank that holds none of the tensor."""
    device = EmulatedChip("p150")
    a, out = device.tensor(torch.zeros(7 * 32, 32).bfloat16()), device.empty((7 * 32, 32), "bfloat16")
    program = variant("reader_variant.cpp", "LAST_ROW")
    program.kernels[0].args = program.kernels[1].args = program.kernels[2].args = {(0, 0): [1, 1]}
    result = run(program, device, {"a": a, "out": out}, root=KERNELS, check=False)
    assert "dram-out-of-range" in kinds(result)
    assert "page 7 of tensor a, which has 7 pages" in str(result.findings[0])


def test_reading_dram_that_nothing_has_written():
    device = EmulatedChip()
    a, out = device.empty((64, 32), "bfloat16"), device.empty((64, 32), "bfloat16")
    result = run(unary(2, grid(1)), device, {"a": a, "out": out}, root=KERNELS, check=False)
    assert kinds(result) == {"uninitialised-read"}


def test_data_read_with_the_alignment_of_the_architecture():
    """32 bytes on Wormhole are half of Blackhole's 64: an offset of 32 suits the one only."""
    program = variant("reader_variant.cpp", "UNALIGNED", 32)
    assert kinds(emulate(program, "p150")) >= {"unaligned-noc-address"}
    assert "unaligned-noc-address" not in kinds(emulate(program, "n150"))


def test_packer_and_unpacker_formats():
    program = variant("unary_variant.cpp", "WRONG_FORMAT", out_fmt="float32")
    assert "mismatched-format" in kinds(emulate(program))


@pytest.mark.parametrize(
    "place, kind",
    [
        (dict(total_size=2048 * 900, page_size=2048), "l1-overflow"),
        (dict(total_size=4096, page_size=2048, address=0x1B000), "l1-overlap"),
    ],
)
def test_l1_layout(place, kind):
    program = unary(TILES, grid(1))
    program.buffers = [*program.buffers, CircularBuffer(5, format="bfloat16", cores=grid(1), **place)]
    assert kind in kinds(emulate(program))


def test_two_roles_push_one_buffer():
    """Each role has its own write pointer, so the second one would write over the first one's pages."""
    cores = grid(1)
    program = Program(
        [
            moved("read_tiles.cpp", "reader", "a", cores, {(0, 0): [0, 1]}),
            moved("read_tiles.cpp", "writer", "a", cores, {(0, 0): [1, 1]}),
        ],
        [buffer(0, cores, pages=4)],
    )
    assert "two-roles" in kinds(emulate(program))


def test_a_push_that_wraps_in_the_middle():
    """3 pages of room, pushed two at a time: the second push would run over the end."""
    cores = grid(1)
    named = {"block": 2, "row_bytes": 128}
    program = Program(
        [
            moved("rows.cpp", "reader", "a", cores, {(0, 0): [0, 4]}, named_compile_args=named),
            moved("write_tiles.cpp", "writer", "out", cores, {(0, 0): [0, 4]}),
            Kernel("tilize.cpp", "compute", cores, named_compile_args={"block": 2}, args={(0, 0): [0, 4]}),
        ],
        [buffer(0, cores, pages=3), buffer(1, cores, pages=4)],
    )
    device = EmulatedChip()
    a, out = device.tensor(torch.zeros(64, 64).bfloat16(), tiled=False), device.empty((64, 64), "bfloat16")
    assert "wrap" in kinds(run(program, device, {"a": a, "out": out}, root=KERNELS, check=False))


def sync(define: str, cores: int = 2, role: str = "reader") -> Program:
    where = grid(cores)
    args = {core: [i, cores] for i, core in enumerate(where)}
    kernel = moved("broken/sync_variant.cpp", role, "", where, args, corners(cores), defines={define: "1"})
    return Program([kernel], [buffer(0, where)], [Semaphore(0, 0, where), Semaphore(1, 0, where)])


@pytest.mark.parametrize(
    "define, kind",
    [
        ("WRONG_COUNT", "multicast-receivers"),
        ("WRONG_CORNERS", "multicast-rectangle"),
        ("NO_SUCH_CORE", "no-such-core"),
        ("SIGNALS_TOO_EARLY", "read-before-barrier"),
        ("NO_ATOMIC_BARRIER", "kernel-end"),
        ("READS_ON_OTHER_NOC", "read-before-barrier"),
        ("WRITES_WORD_OUTSIDE", "l1-out-of-range"),
        ("SETS_OUTSIDE", "l1-out-of-range"),
        ("SETS_ALL_OUTSIDE", "l1-out-of-range"),
        ("ADDS_OUTSIDE", "l1-out-of-range"),
    ],
)
def test_finds_between_cores(define, kind):
    result = emulate(sync(define, 3))
    assert kind in kinds(result), [str(finding) for finding in result.findings]


@pytest.mark.parametrize("define", ["SIGNALS_IN_TIME", "PLAIN_STORE"])
def test_is_content_between_cores(define):
    assert emulate(sync(define)).findings == []


def test_multicast_rectangles_start_at_the_far_corner_on_noc_1():
    assert "multicast-rectangle" in kinds(emulate(sync("SIGNALS_IN_TIME", 3, role="writer")))


@pytest.mark.parametrize("define, waits", [("CROSSED", "semaphore 0"), ("POLLS", "polls memory")])
def test_deadlock_of_semaphores_says_who_waits_for_what(define, waits):
    began = time.monotonic()
    result = emulate(sync(define))
    assert time.monotonic() - began < 20
    (finding,) = [f for f in result.findings if f.kind == "deadlock"]
    assert "2 wait" in finding.message
    for core in ("core (0, 0) reader", "core (1, 0) reader"):
        assert core in finding.message
    assert waits in finding.message


def test_deadlock_of_circular_buffers_says_who_waits_for_what():
    """The reader stops after one page: compute and writer wait for ever."""
    result = emulate(variant("reader_variant.cpp", "DROPS"))
    (finding,) = [f for f in result.findings if f.kind == "deadlock"]
    assert (
        "compute (unary.cpp" in finding.message and "cb_wait_front for 1 pages of circular buffer 0" in finding.message
    )
    assert "writer (write_tiles.cpp" in finding.message and "circular buffer 1" in finding.message
    assert "the compute pushes" in finding.message and "the reader pushes" in finding.message


def test_findings_are_an_error_unless_asked_for():
    device = EmulatedChip()
    a, out = device.tensor(torch.zeros(64, 32).bfloat16()), device.empty((64, 32), "bfloat16")
    program = unary(2, grid(1), reader="broken/reader_no_barrier.cpp")
    with pytest.raises(
        EmulationError, match=r"push-before-barrier: core \(0, 0\) reader broken/reader_no_barrier.cpp:13"
    ) as caught:
        run(program, device, {"a": a, "out": out}, root=KERNELS)
    assert caught.value.findings[0].count == 2


def test_shares_cover_all():
    assert sum(count for _, count in shares(7, grid(3)).values()) == 7
