"""Tiles of sm80/grouped_gemm.cu: chosen to fit and to keep copies in flight, never timed on a GPU that they are for."""

from __future__ import annotations

from dataclasses import dataclass

THREADS, WEIGHT_ROWS = 256, 128


@dataclass(frozen=True)
class MmaGemm:
    """Rows of a tile, a multiple of 32, and stages of the pipeline."""

    max_n: int
    stages: int

    @property
    def shared_memory(self) -> int:
        return self.stages * (WEIGHT_ROWS + self.max_n) * 128

    @property
    def defines(self) -> dict[str, int]:
        return {"MAX_N": self.max_n, "STAGES": self.stages}


# rows an expert gets on average, at most -> tile; where a block may have 163 KiB, and where 99
_TILES: tuple[tuple[float, MmaGemm, MmaGemm], ...] = (
    (24, MmaGemm(32, 4), MmaGemm(32, 4)),
    (64, MmaGemm(64, 3), MmaGemm(64, 4)),
    (float("inf"), MmaGemm(128, 4), MmaGemm(128, 3)),
)


def choose(rows: float, shared_memory: int) -> MmaGemm:
    """The tile for an average number of rows an expert, in a block that may have so many bytes of shared memory."""
    wide, narrow = next((wide, narrow) for most, wide, narrow in _TILES if rows <= most)
    return wide if shared_memory >= 163 << 10 else narrow
