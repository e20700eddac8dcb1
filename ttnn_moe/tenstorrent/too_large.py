"""Experts that are too large for the cores' L1, and what would make them fit.

Each core holds its share of an expert's weight tiles: of two experts if there is room, else of one. The share falls
with the bytes of a weight, with the number of cores, and with I where the chips of a mesh split every expert.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import ContractError
from .device import Device
from .layer_sizes import Sizes, plan_layer
from .weight_formats import FORMATS, ExpertFormats

if TYPE_CHECKING:
    from .._planner import Machine

LEAST_T = 32  # of a program


def too_large(device: Device, sizes: Sizes, reason: str) -> ContractError:
    """The error for sizes without a program of LEAST_T tokens.

    Args:
        reason: the planner's.
    """
    x, y = device.machine.grid
    if reason.startswith("routing"):
        return ContractError(
            "a core has no room for the lists of routing",
            got=f"E={sizes.E}, E_local={sizes.E_local}; {reason.partition(';')[0]}",
            expected="sizes with a program for 32 tokens",
            remedy="fewer experts a device",
        )
    return ContractError(
        "a core has no room for its share of an expert",
        got=f"H={sizes.H}, I={sizes.I}, {sizes.weight_format} weights on {x}x{y} cores; {reason.partition(';')[0]}",
        expected="sizes with a program for 32 tokens",
        remedy=", or ".join(_remedies(device, sizes)) or "smaller experts",
    )


def _fits(machine: Machine, sizes: Sizes, **change: Any) -> bool:
    try:
        plan_layer(replace(sizes, **change), machine, LEAST_T)
    except ValueError:
        return False
    return True


def _narrower(formats: ExpertFormats) -> list[str]:
    """Formats of no more bits for gate and up, and for down, the least change first."""
    up, down = (FORMATS[FORMATS.index(form) :] for form in (formats.gate_up, formats.down))
    pairs = sorted(itertools.product(range(len(up)), range(len(down))), key=lambda pair: (sum(pair), max(pair)))
    return [str(replace(formats, gate_up=up[i], down=down[j])) for i, j in pairs[1:]]


def _remedies(device: Device, sizes: Sizes) -> Iterable[str]:
    """Of formats, meshes and chips, the smallest change for which there are programs."""
    from .. import _planner

    machine, D = device.machine, device.D
    form = next((form for form in _narrower(sizes.formats) if _fits(machine, sizes, weight_format=form)), None)
    if form is not None:
        yield f"weight_format={form!r} (TTNN_MOE_TT_WEIGHTS={form})"
    split = D > 1 and sizes.E_local == sizes.E
    whole = sizes.I * D if split else sizes.I
    meshes = [d for d in (2, 4, 8, 16, 32) if d >= D + split and whole % (32 * d) == 0]
    mesh = next((d for d in meshes if _fits(machine, sizes, E_local=sizes.E, I=whole // d)), None)
    if mesh is not None:
        yield f"load_experts(split=True) on a mesh of 1x{mesh}"
    for chip in _planner.chips():
        other = Device.to_plan_for(chip, D).machine
        if other.grid > machine.grid and _fits(other, sizes):
            yield f"a chip with more cores, such as {chip.name}"
            return
