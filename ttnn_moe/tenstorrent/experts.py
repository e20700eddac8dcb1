"""Expert weights on a device, as tiles.

Each device of a mesh holds gate and up [E_local, H, I] and down [E_local, I, H] of its experts, in the order of
device_expert_mapping. They lie in DRAM as 32x32 tiles of bfloat16 or bfloat8_b, in the order of weights.py.

Tiles are made once and kept on disk: see files.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ContractError
from ..experts import Experts
from ..placement import Placement
from . import files, tensors
from .device import Device, open_device
from .weights import LAYOUT, in_bank_order

FORMATS = ("bfloat16", "bfloat8_b")
WEIGHTS = "TTNN_MOE_TT_WEIGHTS"


def weight_format() -> str:
    """The format that TTNN_MOE_TT_WEIGHTS names; default bfloat16."""
    return os.environ.get(WEIGHTS) or FORMATS[0]


@dataclass(frozen=True, eq=False)
class DeviceExperts:
    """One layer's weights on a device or mesh. Make it with `load_experts`.

    Attributes:
        device, E (of all devices), H, I, weight_format, placement: what was loaded, and onto which devices.
        gate, up, down, mapping: ttnn tensors; mapping is each device's device_expert_mapping [1, E_local].
        ready: calls whose tensors were found right, and their programs (layer.py).
    """

    device: Device
    E: int
    H: int
    I: int
    weight_format: str
    placement: Placement
    gate: Any
    up: Any
    down: Any
    mapping: Any
    ready: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)


def load_experts(
    experts: Experts,
    device: Device | None = None,
    *,
    placement: Placement | None = None,
    weight_format: str = "bfloat16",
    cache: Path | str | None = None,
    least_cached_bytes: int = files.LEAST_CACHED_BYTES,
) -> DeviceExperts:
    """Put a layer's weights on a device or mesh.

    Args:
        experts: dense bf16, all E of them.
        device: default: the one in use; if there is none, a mesh of placement.D devices is opened.
        placement: which device holds which experts, any partition; default: in order.
        weight_format: "bfloat16", or "bfloat8_b" (8 bits a weight, an exponent for 16 of them).
        cache: folder of the tiles; default: see files.py.
        least_cached_bytes: layers smaller than this are not kept on disk.

    Raises:
        ContractError: weights, a placement or a format that the device does not support.
        BackendUnavailable: no device.
    """
    if experts.format != "dense" or experts.dtype != torch.bfloat16:
        raise ContractError(
            "the weights cannot be put on the device",
            got=f"{experts.format} {experts.dtype}",
            expected="dense bfloat16",
            remedy="load the checkpoint's dense weights, in bfloat16",
        )
    if weight_format not in FORMATS:
        raise ContractError("unknown weight format", got=repr(weight_format), expected=f"one of {list(FORMATS)}")
    if experts.H % 32 or experts.I % 32:
        raise ContractError(
            "H and I do not fill whole tiles", got=f"H={experts.H}, I={experts.I}", expected="multiples of 32"
        )
    if placement is None:
        placement = Placement.uniform(experts.E, 1 if device is None else device.D)
    if device is None:
        device = open_device(placement.D)
    if (placement.E, placement.D) != (experts.E, device.D):
        raise ContractError(
            "placement does not fit experts and mesh",
            got=f"E={placement.E}, D={placement.D}",
            expected=f"E={experts.E}, D={device.D}",
        )
    banks = device.machine.dram_banks
    order = placement.device_expert_mapping.flatten().long()
    folder = files.folder(device, cache)
    size = sum(tensor.numel() * tensor.element_size() for tensor in experts.tensors.values())
    key = None
    if folder is not None and size >= least_cached_bytes:
        about = (experts.spec, experts.sizes, weight_format, device.D, order.tolist(), LAYOUT, banks)
        key = files.digest(experts.tensors.values(), *about)

    def tiles(name: str) -> Any:
        """One matrix of every expert, [E, in, out] in placement order."""
        path = None if folder is None or key is None else folder / f"{key}-{name}.tensorbin"
        matrix = _matrix(name, experts)

        def laid() -> Tensor:
            from .._planner import weight_run

            return in_bank_order(matrix[order].transpose(1, 2), device.D, banks, weight_run(weight_format))

        return files.kept(path, lambda: tensors.shard(laid(), device, weight_format, "TILE", on_host=True), device)

    made = {name: tiles(name) for name in ("gate", "up", "down")}
    mapping = tensors.shard(placement.device_expert_mapping, device, "int32")
    return DeviceExperts(device, experts.E, experts.H, experts.I, weight_format, placement, mapping=mapping, **made)


def _matrix(name: str, experts: Experts) -> Tensor:
    """[E, out, in]"""
    if name == "down":
        return experts.tensors["down"]
    both = experts.tensors["gate_up"]
    which = 0 if name == "gate" else 1
    if experts.gate_up_order == "interleaved":
        return both[:, which::2]
    return both[:, which * experts.I : (which + 1) * experts.I]
