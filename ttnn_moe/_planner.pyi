"""
The Tenstorrent program planner: plain C++, no device and no ttnn needed.
"""

class Chip:
    """One chip of a board that programs can be planned for."""

    @property
    def name(self) -> str:
        """Board that carries the chip: n150, n300, p150."""

    @property
    def arch(self) -> str:
        """tt-metal's name of the architecture: wormhole_b0, blackhole."""

    @property
    def chips_per_board(self) -> int:
        """Chips on one board."""

    @property
    def tensix_grid(self) -> tuple[int, int]:
        """Columns and rows of Tensix cores that are not harvested."""

    @property
    def compute_grid(self) -> tuple[int, int]:
        """Columns and rows left to programs beside the dispatch cores."""

    @property
    def l1_bytes(self) -> int:
        """L1 of one Tensix core, bytes."""

    @property
    def dram_bytes(self) -> int:
        """DRAM of one chip, bytes."""

    @property
    def dram_bytes_per_s(self) -> int:
        """DRAM bandwidth of one chip, bytes/s."""

    @property
    def clock_hz(self) -> int:
        """Highest AI clock, Hz."""

    def __repr__(self) -> str: ...

def chips() -> list[Chip]:
    """Every chip that programs can be planned for, in order of name."""

def find_chip(name: str) -> Chip:
    """The chip of that name. ValueError lists the known names."""
