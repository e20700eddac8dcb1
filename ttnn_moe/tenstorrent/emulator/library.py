"""The stand-in for ttnn on emulated devices: tensors to and from the host, and collectives between chips.

Names and meaning are ttnn's. `run` runs programs; the host moves and adds the bytes of collectives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...errors import ContractError
from . import stock
from .chip import CHIPS
from .mesh import DRAM_MEMORY_CONFIG, ROW_MAJOR_LAYOUT, TILE_LAYOUT, Mesh, StorageType, Tensor, on_chips

__all__ = ["DRAM_MEMORY_CONFIG", "ROW_MAJOR_LAYOUT", "TILE_LAYOUT", "Mesh", "StorageType", "Tensor"]
__version__ = "emulator"

bfloat16, float32, int32, uint32 = "bfloat16", "float32", "int32", "uint32"
bfloat8_b, bfloat4_b = "bfloat8_b", "bfloat4_b"


class Topology:
    Linear = "Linear"


@dataclass(frozen=True)
class ReplicateTensorToMesh:
    mesh: Mesh


@dataclass(frozen=True)
class ShardTensorToMesh:
    mesh: Mesh
    dim: int


def open_mesh(D: int = 1, chip: str = "p150", **options: Any) -> Mesh:
    """D emulated chips of a board: p150 (Blackhole), n150 or n300 (Wormhole)."""
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


def reshape(tensor: Tensor, shape: Sequence[int], padded: Sequence[int] | None = None) -> Tensor:
    """padded: the shape with the padding of tiles. What the result has of the padding of `tensor` is NaN."""
    import builtins

    cut, whole = tuple(map(builtins.slice, shape)), tuple(padded or shape)
    parts = tensor.read()
    if padded is not None and math.prod(whole) > parts[0].numel():
        sides = [side for size in reversed(parts[0].shape[-2:]) for side in (0, -size % 32)]
        parts = [F.pad(values, sides, value=math.nan) for values in parts]
    return _again(tensor, [values.reshape(whole)[cut] for values in parts])


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


def __getattr__(name: str) -> Any:
    """ttnn's own operators."""
    try:
        return vars(stock)[name]
    except KeyError:
        raise AttributeError(f"the emulator's stand-in for ttnn has no {name}") from None
