"""Tiles of a grouped MXFP8 x MXFP4 product on compute capability 12.x: which fit, and which M suits T tokens.

A tile makes M tokens by N weight rows, of K = 128 channels a stage. Its physical form has 64 or 128 rows, as CUTLASS
limits tiles and scale layouts. A tile of other M is swapped: its weight rows are the rows, its tokens the columns.

The model: shared memory holds an epilogue and two or more stages. `kind::mxf8f6f4` reads FP4 padded, 16 numbers in 16
bytes, so both operands have a byte for each element. A stage also has ue8m0 scales of 32 channels, their rows padded to
128, and its barriers. These are the sizes of CUTLASS's block-scaled kernels. gpu_kernels/cuda/sm120/mxfp4_product.cu
takes the model's stages, and no more memory: `Tile.shared_memory`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...errors import ContractError
from ...sizes import ceil_div
from ..arch import ARCHES

CAPACITY = ARCHES[12, 0].shared_memory
"""Bytes that a block may have."""
K = 128
STAGES = 2
"""At least: one is filled while another is multiplied."""
_ROWS = (64, 128)  # of a physical tile
_COLUMNS = (8, 16, 32, 64, 128, 256)
_SCALED_ROWS, _GROUP = 128, 32
_BARRIERS = 16


@dataclass(frozen=True)
class Tile:
    """M tokens by N weight rows.

    Attributes:
        packed: both operands are FP4 of half a byte, as `kind::mxf4` reads them.
    """

    read_once: ClassVar[bool] = False

    def __str__(self) -> str:
        """As `ttnn-moe warmup --tiles` takes it."""
        return f"{self.M}x{self.N}"

    M: int
    N: int
    packed: bool = False

    @property
    def swapped(self) -> bool:
        """Whether outputs are the rows of the physical tile."""
        return self.M not in _ROWS

    @property
    def physical(self) -> tuple[int, int]:
        """Rows and columns."""
        return (self.N, self.M) if self.swapped else (self.M, self.N)

    @property
    def max_n(self) -> int:
        """Rows of a tile of the sort, at most."""
        return self.M

    @property
    def granule(self) -> int:
        """Rows that one instruction makes."""
        return 8 if self.swapped else 16

    @property
    def fused(self) -> bool:
        """Whether the gate/up product quantises its activations: 64 weight rows make the 32 that share a scale."""
        return self.N >= 64

    @property
    def warps(self) -> tuple[int, int]:
        """Warps along rows and columns."""
        rows, columns = self.physical
        return rows // (32 if rows * columns > 8192 else 16), ceil_div(columns, 64)

    @property
    def threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1]

    @property
    def shared_memory(self) -> int:
        """Bytes that the kernel takes: its stages, and maxima that warps of a swapped tile exchange."""
        stage = (self.M + self.N) * K // (2 if self.packed else 1) + 4 * self.M + 8 * self.N
        return self.stages * stage + (4 * self.warps[0] * self.M if self.swapped else 0)

    @property
    def defines(self) -> dict[str, object]:
        """Of the kernel."""
        return {"TILE_M": self.M, "TILE_N": self.N, "STAGES": self.stages, "PACKED": self.packed}

    @property
    def stage_bytes(self) -> int:
        """Of the model: tokens, weights, scales of both and barriers of one stage."""
        operands = (self.M + self.N) * K // (2 if self.packed else 1)
        scales = sum(-(-n // _SCALED_ROWS) * _SCALED_ROWS * K // _GROUP for n in (self.M, self.N))
        return operands + scales + _BARRIERS

    @property
    def epilogue_bytes(self) -> int:
        """Of the model: outputs on their way, a part of 64 x 16, or x 8 where the tile is as narrow."""
        return 64 * min(16, self.physical[1]) * 6 + 1024

    @property
    def stages(self) -> int:
        """Stages that fit."""
        return (CAPACITY - self.epilogue_bytes) // self.stage_bytes


def why_not(tile: Tile) -> str | None:
    """Why a tile cannot run, or None."""
    rows, columns = tile.physical
    name = f"tile {tile.M} x {tile.N}" + (f" (physically {rows} x {columns})" if tile.swapped else "")
    if tile.stages < STAGES:
        needed = tile.epilogue_bytes + STAGES * tile.stage_bytes
        return f"{name} needs {needed} bytes of shared memory for {STAGES} stages, and a block has {CAPACITY}"
    if rows not in _ROWS or columns not in _COLUMNS:
        return f"{name} has another form than {_ROWS} rows by {_COLUMNS} columns"
    return None


_SIZES = (8, 16, 32, 64, 128, 256)
TILES = tuple(tile for M in _SIZES for N in _SIZES if why_not(tile := Tile(M, N)) is None)
"""All that can run."""
TILES_M = tuple(sorted({tile.M for tile in TILES}))


def select_tile_m(T: int) -> int:
    """The M of tiles for T tokens: the least that holds all of them, else the largest.

    No value is read from the GPU. An expert with more rows takes several tiles, so that any M is correct.

    Raises:
        ContractError: T is negative.
    """
    if T < 0:
        raise ContractError("there is no such number of tokens", got=T, expected="0 or more")
    return next((M for M in TILES_M if T <= M), TILES_M[-1])
