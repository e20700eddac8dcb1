"""A 1xD mesh of emulated chips, and tensors on it: each chip holds its part at the same address."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .chip import ChipModel
from .dram import EmulatedChip
from .dram import Tensor as Part
from .result import Result
from .run import run

TILE_LAYOUT, ROW_MAJOR_LAYOUT = "TILE_LAYOUT", "ROW_MAJOR_LAYOUT"
DRAM_MEMORY_CONFIG = "DRAM_MEMORY_CONFIG"
# Tensors of which an operator reads undefined values. SiLU*mul does not see the routing: it runs over the rows past the
# last block, which have any value.
_UNDEFINED = {"silu_mul": ("gate", "up")}


class StorageType:
    DEVICE, HOST = "DEVICE", "HOST"


@dataclass
class Grid:
    x: int
    y: int


@dataclass(eq=False)
class Mesh:
    """D emulated chips; one chip is a mesh of one.

    Args:
        chip: the chips' model.
        D: how many.
        check: raise EmulationError for a finding.
        exact, sanitizer, seed, timeout_s: see run(). root: folder of the kernel sources; default: device_kernels.
        keep: keep results. results: for every program so far, the result of each chip, in order.
    """

    chip: ChipModel
    D: int = 1
    check: bool = True
    exact: bool = True
    sanitizer: str | None = None
    seed: int | None = None
    root: Path | None = None
    timeout_s: int = 600
    keep: bool = False
    results: list[list[Result]] = field(default_factory=list)
    devices: list[EmulatedChip] = field(init=False)
    _programs: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.devices = [EmulatedChip(self.chip) for _ in range(self.D)]

    def arch(self) -> str:
        return self.chip.arch

    def compute_with_storage_grid_size(self) -> Grid:
        return Grid(*self.chip.grid)

    def dram_grid_size(self) -> Grid:
        return Grid(self.chip.dram_banks, 1)

    def get_optimal_dram_bank_to_logical_worker_assignment(self, noc: Any) -> list[Grid]:
        """Of each bank, the core that stands next to it."""
        return [Grid(x, y) for x, y in self.chip.bank_cores]

    def l1_size_per_core(self) -> int:
        return self.chip.l1_size

    def get_num_devices(self) -> int:
        return self.D

    def num_program_cache_entries(self) -> int:
        """Number of different programs that were launched so far."""
        return len(self._programs)

    def launch(self, program: Any, tensors: Mapping[str, Tensor], scalars: Mapping[str, int]) -> None:
        """Run a program on every chip with that chip's parts of the tensors."""
        self._programs[id(program)] = program
        operator = program.kernels[0].source.partition("/")[0]
        results = []
        for i, device in enumerate(self.devices):
            parts = {name: tensor.parts[i] for name, tensor in tensors.items()}
            results.append(
                run(
                    program,
                    device,
                    parts,
                    scalars,
                    check=self.check,
                    exact=self.exact,
                    sanitizer=self.sanitizer,
                    seed=self.seed,
                    root=self.root,
                    timeout_s=self.timeout_s,
                    undefined=_UNDEFINED.get(operator, ()),
                )
            )
        if self.keep:
            self.results.append(results)


class Tensor:
    """A tensor on the host (values) or on every chip of a mesh (parts).

    Attributes:
        place: its memory config. All parts lie interleaved in DRAM; another place is a name that checks see.
    """

    def __init__(self, mesh: Mesh | None, parts: list[Part], values: list[torch.Tensor], dtype: str, layout: str):
        self.mesh, self.parts, self.values = mesh, parts, values
        self.dtype, self.layout = dtype, layout
        self.place: object = DRAM_MEMORY_CONFIG

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape if self.parts else tuple(self.values[0].shape)

    def storage_type(self) -> str:
        return StorageType.DEVICE if self.parts else StorageType.HOST

    def device(self) -> Mesh | None:
        return self.mesh

    def memory_config(self) -> object:
        return self.place if self.parts else None

    def buffer_address(self) -> int:
        return self.parts[0].address

    def read(self) -> list[torch.Tensor]:
        """Each chip's values."""
        return [part.read() for part in self.parts] if self.parts else self.values

    def __del__(self) -> None:
        for part in getattr(self, "parts", ()):
            part.free()


def on_chips(mesh: Mesh, values: list[torch.Tensor], dtype: str, layout: str) -> Tensor:
    """A tensor of these values, one for each chip."""
    made = [
        one.tensor(part, dtype, tiled=layout == TILE_LAYOUT) for one, part in zip(mesh.devices, values, strict=True)
    ]
    return Tensor(mesh, made, [], dtype, layout)
