"""What the links of the NoC carry when cores read DRAM: counted along the routes, without congestion.

The NoC is a torus of one-way links. NoC 0 goes right and then down, NoC 1 up and then left. Only the bytes that come
from DRAM are counted: between cores and to DRAM the operators move far fewer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .chip import ChipModel
from .result import Result

Router = tuple[int, int]
Link = tuple[int, Router, Router]


@dataclass(frozen=True)
class Load:
    """Bytes read from DRAM, those bytes times the links that each passed, and what the busiest link carried."""

    read: int
    carried: int
    busiest: int

    @property
    def hops(self) -> float:
        """Links that a byte passed, on average."""
        return self.carried / self.read if self.read else 0.0


def route(chip: ChipModel, noc: int, start: Router, end: Router) -> Iterator[Link]:
    """The links from one router to another."""
    (columns, rows), (x, y), step = chip.torus, start, 1 if noc == 0 else -1
    for across in (True, False) if noc == 0 else (False, True):
        while (x, y)[not across] != end[not across]:
            came = x, y
            x, y = ((x + step) % columns, y) if across else (x, (y + step) % rows)
            yield noc, came, (x, y)


def load(chip: ChipModel, result: Result, exchanged: bool = False) -> Load:
    """What the reads of a program load the links with. exchanged: had each kernel the other NoC."""
    carried: Counter[Link] = Counter()
    read = 0
    for (x, y), of_banks in result.banks.items():
        for i, size in enumerate(of_banks):
            noc, bank = divmod(i, chip.dram_banks)
            noc ^= exchanged
            read += size
            for link in route(chip, noc, chip.banks[noc][bank], (chip.core_x[x], chip.core_y[y])) if size else ():
                carried[link] += size
    return Load(read, sum(carried.values()), max(carried.values(), default=0))
