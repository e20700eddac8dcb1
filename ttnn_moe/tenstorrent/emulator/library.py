"""What the backend calls of ttnn, on emulated devices: tensors to and from the host, on one chip or a 1xD mesh, and the
collectives between chips. Programs are run by run(); collectives move and add bytes on the host.

Names and meaning are ttnn's. A mesh is D devices that hold their tensors at the same addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import ContractError
from .chip import CHIPS, ChipModel
from .device import Device
from .device import Tensor as Part
from .result import Result
from .run import run

bfloat16, float32, int32, uint32, bfloat8_b = "bfloat16", "float32", "int32", "uint32", "bfloat8_b"
TILE_LAYOUT, ROW_MAJOR_LAYOUT = "TILE_LAYOUT", "ROW_MAJOR_LAYOUT"
DRAM_MEMORY_CONFIG = "DRAM_MEMORY_CONFIG"
__version__ = "emulator"

# Tensors that an operator reads beyond what is defined: a step's rows past the last block have any value, and
# SiLU*mul, which does not see the routing, runs over them too.
_UNDEFINED = {"silu_mul": ("gate", "up")}


class StorageType:
    DEVICE, HOST = "DEVICE", "HOST"


class Topology:
    Linear = "Linear"


@dataclass
class Grid:
    x: int
    y: int


@dataclass(eq=False)
class Mesh:
    """D emulated chips; one is a mesh of one.

    Args:
        chip: the chips' model.
        D: how many.
        check: a finding of a program is an error.
        exact, sanitizer: see run().
        results: of every program so far, for each the chips' results in order, if `keep` is set.
    """

    chip: ChipModel
    D: int = 1
    check: bool = True
    exact: bool = True
    sanitizer: str | None = None
    keep: bool = False
    results: list[list[Result]] = field(default_factory=list)
    devices: list[Device] = field(init=False)
    _programs: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.devices = [Device(self.chip) for _ in range(self.D)]

    def arch(self) -> str:
        return self.chip.arch

    def compute_with_storage_grid_size(self) -> Grid:
        return Grid(*self.chip.grid)

    def get_num_devices(self) -> int:
        return self.D

    def num_program_cache_entries(self) -> int:
        """Programs that were launched so far, however often."""
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
                    undefined=_UNDEFINED.get(operator, ()),
                )
            )
        if self.keep:
            self.results.append(results)


class Tensor:
    """A tensor on the host (values) or on every chip of a mesh (parts)."""

    def __init__(self, mesh: Mesh | None, parts: list[Part], values: list[torch.Tensor], dtype: str, layout: str):
        self.mesh, self.parts, self.values = mesh, parts, values
        self.dtype, self.layout = dtype, layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape if self.parts else tuple(self.values[0].shape)

    def storage_type(self) -> str:
        return StorageType.DEVICE if self.parts else StorageType.HOST

    def device(self) -> Mesh | None:
        return self.mesh

    def memory_config(self) -> str | None:
        return DRAM_MEMORY_CONFIG if self.parts else None

    def buffer_address(self) -> int:
        return self.parts[0].address

    def read(self) -> list[torch.Tensor]:
        """Each chip's values."""
        return [part.read() for part in self.parts] if self.parts else self.values

    def __del__(self) -> None:
        for part in getattr(self, "parts", ()):
            part.free()


@dataclass(frozen=True)
class ReplicateTensorToMesh:
    mesh: Mesh


@dataclass(frozen=True)
class ShardTensorToMesh:
    mesh: Mesh
    dim: int


def open_mesh(D: int = 1, chip: str = "p150", **options: Any) -> Mesh:
    """D emulated chips of a board: p150 (Blackhole) or n150 (Wormhole)."""
    if chip not in CHIPS:
        raise ContractError("no such chip to emulate", got=repr(chip), expected=", ".join(CHIPS))
    return Mesh(CHIPS[chip], D, **options)


def from_torch(
    values: torch.Tensor,
    *,
    dtype: str,
    layout: str,
    device: Mesh | None = None,
    memory_config: object = None,
    mesh_mapper: ReplicateTensorToMesh | ShardTensorToMesh | None = None,
) -> Tensor:
    mesh = device or (mesh_mapper.mesh if mesh_mapper is not None else None)
    D = mesh.D if mesh is not None else 1
    if isinstance(mesh_mapper, ShardTensorToMesh):
        parts = list(values.chunk(D, mesh_mapper.dim))
    else:
        parts = [values] * D
    host = Tensor(None, [], parts, dtype, layout)
    return to_device(host, device) if device is not None else host


def to_device(tensor: Tensor, mesh: Mesh, *, memory_config: object = None) -> Tensor:
    if len(tensor.values) not in (1, mesh.D):
        raise ContractError("a tensor does not fit the mesh", got=f"{len(tensor.values)} parts", expected=f"D={mesh.D}")
    values = tensor.values * mesh.D if len(tensor.values) == 1 else tensor.values
    return on_chips(mesh, values, tensor.dtype, tensor.layout)


def empty(shape: Sequence[int], *, dtype: str, layout: str, device: Mesh, memory_config: object = None) -> Tensor:
    parts = [one.empty(tuple(shape), dtype, tiled=layout == TILE_LAYOUT) for one in device.devices]
    return Tensor(device, parts, [], dtype, layout)


def to_torch(tensor: Tensor) -> torch.Tensor:
    return tensor.read()[0]


def get_device_tensors(tensor: Tensor) -> list[Tensor]:
    """Each chip's values, on the host."""
    return [Tensor(None, [], [values], tensor.dtype, tensor.layout) for values in tensor.read()]


def reshape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    return _again(tensor, [values.reshape(tuple(shape)) for values in tensor.read()])


def slice(tensor: Tensor, begin: Sequence[int], end: Sequence[int]) -> Tensor:
    import builtins

    cut = tuple(builtins.slice(b, e) for b, e in zip(begin, end, strict=True))
    return _again(tensor, [values[cut] for values in tensor.read()])


def typecast(tensor: Tensor, dtype: str) -> Tensor:
    assert tensor.mesh is not None
    return on_chips(tensor.mesh, tensor.read(), dtype, tensor.layout)


def copy(tensor: Tensor, out: Tensor) -> None:
    for part, values in zip(out.parts, tensor.read(), strict=True):
        part.write(values)


def copy_host_to_device_tensor(host: Tensor, out: Tensor) -> None:
    for i, part in enumerate(out.parts):
        part.write(host.values[i % len(host.values)])


def reduce_scatter(tensor: Tensor, *, dim: int, topology: object = None) -> Tensor:
    """Each chip gets its share along dim of the sum over chips, added in ascending order in the tensor's dtype."""
    parts = tensor.read()
    total = parts[0]
    for values in parts[1:]:
        total = total + values
    return _again(tensor, list(total.chunk(len(parts), dim)))


def all_gather(tensor: Tensor, *, dim: int, topology: object = None) -> Tensor:
    """Every chip gets the chips' parts, joined along dim."""
    parts = tensor.read()
    return _again(tensor, [torch.cat(parts, dim)] * len(parts))


def to_layout(tensor: Tensor, layout: str) -> Tensor:
    assert tensor.mesh is not None
    return on_chips(tensor.mesh, tensor.read(), tensor.dtype, layout)


def _again(tensor: Tensor, values: list[torch.Tensor]) -> Tensor:
    assert tensor.mesh is not None
    return on_chips(tensor.mesh, values, tensor.dtype, tensor.layout)


def on_chips(mesh: Mesh, values: list[torch.Tensor], dtype: str, layout: str) -> Tensor:
    """A tensor of these values, one for each chip."""
    made = [
        one.tensor(part, dtype, tiled=layout == TILE_LAYOUT) for one, part in zip(mesh.devices, values, strict=True)
    ]
    return Tensor(mesh, made, [], dtype, layout)


def __getattr__(name: str) -> Any:
    """ttnn's own operators."""
    from . import stock

    try:
        return vars(stock)[name]
    except KeyError:
        raise AttributeError(f"the emulator's stand-in for ttnn has no {name}") from None
