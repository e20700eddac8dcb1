"""The modelled chips: memory sizes, alignment rules, NoC coordinates, and rates for estimates of time.

Sources: noc_parameters.h, dev_mem_map.h and the SoC descriptors of ttnn 0.81, and Tenstorrent's board pages for DRAM
bandwidth. Virtual NoC coordinates are those that ttnn reports for the boards named, and cores next to banks those that
it names in ttsim. Boards differ in which rows are harvested; here an n150 and an n300 lack the last ones. Cores next to
an n300's banks are an assumption: those of an n150, and for a bank without a row another column's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ChipModel:
    """One chip as programs see it.

    Args:
        name: board that carries it.
        arch: tt-metal's name of the architecture.
        grid: columns and rows of cores that programs may use.
        noc_x, noc_y: virtual NoC coordinate of each column and of each row.
        l1_size: bytes of L1 of a core.
        l1_first: the first that circular buffers may take. 108 KiB stand for both architectures: in ttnn 0.81.1 they
            start at 103.3 KiB on Wormhole and at 109.1 KiB on Blackhole. Plans leave 128 KiB.
        dram_banks: banks that a tensor's pages are interleaved over.
        dram_alignment: bytes; pages start at multiples of it.
        dram_read_alignment: bytes; source and destination of a DRAM read agree modulo this.
        dram_bytes_per_s, clock_hz: of the whole chip.
        noc_bytes_per_cycle: of one NoC link.
        torus: columns and rows of the NoC. core_x, core_y: where on it each column and each row of cores stands.
        banks: of NoC 0 and of NoC 1, where each DRAM bank stands. bank_cores: the core next to it, by ttnn.
    """

    name: str
    arch: str
    grid: tuple[int, int]
    noc_x: tuple[int, ...]
    noc_y: tuple[int, ...]
    l1_size: int
    l1_first: int
    dram_banks: int
    dram_alignment: int
    dram_read_alignment: int
    dram_bytes_per_s: float
    clock_hz: float
    noc_bytes_per_cycle: int
    torus: tuple[int, int]
    core_x: tuple[int, ...]
    core_y: tuple[int, ...]
    banks: tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
    bank_cores: tuple[tuple[int, int], ...]


_WORMHOLE_L1 = 1464 * 1024
_BLACKHOLE_L1 = 1536 * 1024
_WORMHOLE_BANKS = tuple((0, y) for y in (11, 1, 5, 7)) + tuple((5, y) for y in (1, 11, 2, 9, 8, 3, 5, 7))
_BLACKHOLE_BANKS = tuple(tuple((x, y) for x in (0, 9) for y in rows) for rows in ((11, 2, 9, 5), (1, 10, 4, 7)))

N150 = ChipModel(
    name="n150",
    arch="wormhole_b0",
    grid=(8, 8),
    noc_x=tuple(range(18, 26)),
    noc_y=tuple(range(18, 26)),
    l1_size=_WORMHOLE_L1,
    l1_first=0x1B000,
    dram_banks=12,
    dram_alignment=32,
    dram_read_alignment=32,
    dram_bytes_per_s=288e9,
    clock_hz=1.0e9,
    noc_bytes_per_cycle=32,
    torus=(10, 12),
    core_x=(1, 2, 3, 4, 6, 7, 8, 9),
    core_y=(1, 2, 3, 4, 5, 7, 8, 9),
    banks=(_WORMHOLE_BANKS, _WORMHOLE_BANKS),
    bank_cores=((3, 7), (0, 0), (0, 4), (0, 5), (4, 0), (7, 7), (4, 1), (4, 7), (4, 6), (4, 2), (4, 4), (4, 5)),
)
N300 = replace(
    N150,
    name="n300",
    grid=(8, 7),
    noc_y=N150.noc_y[:7],
    core_y=N150.core_y[:7],
    bank_cores=((3, 6), (0, 0), (0, 4), (0, 5), (4, 0), (7, 6), (4, 1), (5, 6), (4, 6), (4, 2), (4, 4), (4, 5)),
)
"""One of the two chips of the board."""
P150 = ChipModel(
    name="p150",
    arch="blackhole",
    grid=(13, 10),
    noc_x=(*range(1, 8), *range(10, 16)),
    noc_y=tuple(range(2, 12)),
    l1_size=_BLACKHOLE_L1,
    l1_first=0x1B000,
    dram_banks=8,
    dram_alignment=64,
    dram_read_alignment=64,
    dram_bytes_per_s=512e9,
    clock_hz=1.35e9,
    noc_bytes_per_cycle=64,
    torus=(17, 12),
    core_x=(*range(1, 8), *range(10, 16)),
    core_y=tuple(range(2, 12)),
    banks=(_BLACKHOLE_BANKS[0], _BLACKHOLE_BANKS[1]),
    bank_cores=((0, 9), (0, 0), (0, 7), (0, 3), (7, 9), (7, 1), (7, 6), (7, 4)),
)
CHIPS = {chip.name: chip for chip in (N150, N300, P150)}
