"""The sum of the devices' partial outputs: reduce_scatter, then all_gather, over the 1xD mesh."""

from __future__ import annotations

from typing import Any

from ..sizes import ceil_div
from .device import Device
from .runtime import library


def partial_dtype(device: Device) -> str:
    """float32; on Wormhole's simulator bfloat16, the one dtype that it reduces."""
    return "float32" if device.machine.unpack_to_dest else "bfloat16"


def partial_rows(T: int, H: int, device: Device) -> int:
    """Rows of a partial output of T tokens: whole tiles. If rows are scattered, every device gets the same number."""
    unit = 32 if _by_columns(H, device) else 32 * device.D
    return ceil_div(T, unit) * unit


def summed_columns(H: int, D: int) -> int:
    """Columns of a partial output that `all_reduce` scatters: whole tiles for each of D devices; H on one."""
    return H if D == 1 else ceil_div(H, 32 * D) * 32 * D


def _by_columns(H: int, device: Device) -> bool:
    """Whether columns are scattered: every device gets whole tiles of H."""
    return H % (32 * device.D) == 0


def all_reduce(partial: Any, dtype: Any = None, *, dim: int = 3) -> Any:
    """The sum over the devices of partial [1, 1, T, columns], tiles; every device gets it.

    Args:
        dtype: of the sum; default: that of partial. Sums have the dtype of partial, and are rounded before the gather.
        dim: the dimension that is scattered; each device takes whole tiles of it.
    """
    ttnn = library()

    part = ttnn.reduce_scatter(partial, dim=dim, topology=ttnn.Topology.Linear)
    if dtype is not None and part.dtype != dtype:
        part = ttnn.typecast(part, dtype)
    return all_gathered(part, dim)


def all_gathered(part: Any, dim: int = 3) -> Any:
    """The devices' parts, joined along dim; every device gets it."""
    ttnn = library()

    return ttnn.all_gather(part, dim=dim, topology=ttnn.Topology.Linear)


def sum_over_devices(partial: Any, T: int, dtype: Any, device: Device) -> Any:
    """Add up the devices' partial [partial_rows, H] tiles: [T, H] of this dtype on every device."""
    ttnn = library()

    rows, H = (int(size) for size in partial.shape)
    if _by_columns(H, device):
        # a view without the padding rows of the last tile
        return ttnn.reshape(all_reduce(ttnn.reshape(partial, (1, 1, T, H), (1, 1, rows, H)), dtype), (T, H))
    whole = ttnn.reshape(all_reduce(ttnn.reshape(partial, (1, 1, rows, H)), dtype, dim=2), (rows, H))
    return whole if rows == T else ttnn.slice(whole, [0, 0], [T, H])
