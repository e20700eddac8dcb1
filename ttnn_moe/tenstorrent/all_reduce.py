"""The sum of the devices' partial outputs: reduce_scatter, then all_gather, over the 1xD mesh."""

from __future__ import annotations

from typing import Any

from ..sizes import ceil_div
from .device import Device
from .runtime import library


def partial_dtype(device: Device) -> str:
    """float32; bfloat16 on Wormhole, where the simulator that this was run in reduces nothing else."""
    return "float32" if device.machine.unpack_to_dest else "bfloat16"


def partial_rows(T: int, H: int, device: Device) -> int:
    """Rows of a partial output of T tokens: whole tiles, of which every device gets as many if it is cut by rows."""
    unit = 32 if _by_columns(H, device) else 32 * device.D
    return ceil_div(T, unit) * unit


def _by_columns(H: int, device: Device) -> bool:
    """Whether devices get whole tiles of H each."""
    return H % (32 * device.D) == 0


def sum_over_devices(partial: Any, out: Any, device: Device) -> None:
    """partial [partial_rows, H] tiles, one on each device -> out [T, H], their sum, on every device.

    The sum is taken in partial's dtype and rounded to out's before it is gathered.
    """
    ttnn = library()

    rows, H = (int(size) for size in partial.shape)
    # scattered along H where each device gets whole tiles of it, else along the tokens
    wide = ttnn.reshape(partial, (1, 1, rows, H))
    dim = 3 if _by_columns(H, device) else 2
    part = ttnn.reduce_scatter(wide, dim=dim, topology=ttnn.Topology.Linear)
    if part.dtype != out.dtype:
        part = ttnn.typecast(part, out.dtype)
    whole = ttnn.reshape(ttnn.all_gather(part, dim=dim, topology=ttnn.Topology.Linear), (rows, H))
    if rows != int(out.shape[0]):
        whole = ttnn.slice(whole, [0, 0], [int(out.shape[0]), H])
    ttnn.copy(whole, out)
