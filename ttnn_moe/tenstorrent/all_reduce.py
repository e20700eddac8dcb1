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


def _by_columns(H: int, device: Device) -> bool:
    """Whether columns are scattered: every device gets whole tiles of H."""
    return H % (32 * device.D) == 0


def sum_over_devices(partial: Any, out: Any, device: Device) -> None:
    """Add up the devices' partial [partial_rows, H] tiles; every device gets the sum in out [T, H].

    The sum has the dtype of `partial`, and is rounded to out's before the gather.
    """
    ttnn = library()

    rows, H = (int(size) for size in partial.shape)
    # along H if each device gets whole tiles of it, else along the tokens
    wide = ttnn.reshape(partial, (1, 1, rows, H))
    dim = 3 if _by_columns(H, device) else 2
    part = ttnn.reduce_scatter(wide, dim=dim, topology=ttnn.Topology.Linear)
    if part.dtype != out.dtype:
        part = ttnn.typecast(part, out.dtype)
    whole = ttnn.reshape(ttnn.all_gather(part, dim=dim, topology=ttnn.Topology.Linear), (rows, H))
    if rows != int(out.shape[0]):
        whole = ttnn.slice(whole, [0, 0], [int(out.shape[0]), H])
    ttnn.copy(whole, out)
