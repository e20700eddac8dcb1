"""Expert weights on a device, as tiles.

Each device of a mesh holds gate and up [E_local, H, I] and down [E_local, I, H] of its experts, in the order of
device_expert_mapping. They lie in DRAM as 32x32 tiles of bfloat16, bfloat8_b or bfloat4_b, in the order and shape of
weights.py: [E_local, I / 32, H, 32] and [E_local, H / 32, I, 32].

Where a step visits few experts, `split=True` gives each device all E experts, and 1/D of every expert's I: all devices
then read the same number of bytes, whatever the routing. The sum over devices is the same.

Tiles are made once and kept on disk: see files.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arguments import is_size
from ..errors import ContractError
from ..experts import Experts
from ..placement import Placement
from ..problem import check_kind
from ..visible import shown
from . import device as devices
from . import files, tensors
from .device import Device, open_device
from .layer_sizes import Sizes
from .programs import programs_of
from .weight_formats import ComputeConfig, ExpertFormats, ModelFormats
from .weights import LAYOUT, TILE, in_bank_order

WEIGHTS = "TTNN_MOE_TT_WEIGHTS"


def weight_format() -> str:
    """The formats that TTNN_MOE_TT_WEIGHTS names; default bfloat16.

    Raises:
        ContractError: it names others.
    """
    named = os.environ.get(WEIGHTS)
    if not named:
        return str(ExpertFormats())
    try:
        ModelFormats.parse(named)
    except ContractError as error:
        raise ContractError(
            f"{WEIGHTS}: {error.what}", got=error.got, expected=error.expected, remedy=f"correct or unset {WEIGHTS}"
        ) from None
    return named


@dataclass(frozen=True, eq=False)
class DeviceExperts:
    """One layer's weights on a device or mesh. Make it with `load_experts`.

    Attributes:
        device, E (of all devices), H, I, formats, compute: what was loaded, onto which devices, for which products.
        placement: which device holds which experts. None: every device holds I / D of all of them.
        gate, up, down, mapping: ttnn tensors; mapping is each device's device_expert_mapping [1, E_local].
        ready: calls whose tensors were found right, and their programs (layer.py).
    """

    device: Device
    E: int
    H: int
    I: int
    formats: ExpertFormats
    placement: Placement | None
    gate: Any
    up: Any
    down: Any
    mapping: Any
    compute: ComputeConfig = ComputeConfig()
    ready: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def E_local(self) -> int:
        """Experts that a device holds, or holds a part of."""
        return self.E if self.placement is None else self.placement.E_local

    @property
    def I_local(self) -> int:
        """Of each expert's I, how many a device holds."""
        return self.I // self.device.D if self.placement is None else self.I

    def sizes(self, K: int) -> Sizes:
        """Sizes of a layer with K of these experts a token."""
        return Sizes(self.E, self.E_local, K, self.H, self.I_local, str(self.formats), self.compute)

    def step_rows(self, T: int, K: int) -> int:
        """Rows of a device's gate, up and activations, of T tokens with K experts each; see steps.py.

        Raises:
            ContractError: more tokens than one program takes; T or K is no such number.
        """
        if not (is_size(T) and is_size(K) and T >= 0 and K >= 1):
            got = f"T={shown(T)}, K={shown(K)}"
            raise ContractError("no such sizes", got=got, expected="integers, T >= 0 and K >= 1")
        programs = programs_of(self.device, self.sizes(K))
        return programs.rows(programs.bound(T))


def load_experts(
    experts: Experts,
    device: Device | None = None,
    *,
    placement: Placement | None = None,
    split: bool = False,
    weight_format: str = "bfloat16",
    compute: ComputeConfig | None = None,
    cache: Path | str | None = None,
    least_cached_bytes: int = files.LEAST_CACHED_BYTES,
) -> DeviceExperts:
    """Put a layer's weights on a device or mesh.

    Args:
        experts: dense bf16, all E of them.
        device: default: the one in use; if there is none, a mesh of placement.D devices is opened, without a placement
            one device.
        placement: which device holds which experts, any partition; default: in order, E / D a device.
        split: instead of whole experts, each of D devices holds I / D of every expert; see balance.py for when.
        weight_format: "bfloat16", "bfloat8_b" or "bfloat4_b" (an exponent for 16 weights), or those of gate_up and of
            down: "bfloat4_b,bfloat8_b". With ",layout=banked" a DRAM bank holds one part of every expert.
        compute: how products are made; default: ComputeConfig().
        cache: folder of the tiles; default: see files.py.
        least_cached_bytes: layers smaller than this are not kept on disk.

    Raises:
        ContractError: weights, a placement or a format that the device does not support, experts that are too large for
            the cores' L1, or an argument of another kind. No weight was moved.
        BackendUnavailable: no device, a closed one, or another mesh than the placement's is open.
    """
    _check_kinds(experts, device, placement, compute)
    if experts.format != "dense" or experts.dtype != torch.bfloat16:
        raise ContractError(
            "the weights cannot be put on the device",
            got=f"{experts.format} {experts.dtype}",
            expected="dense bfloat16",
            remedy="load the checkpoint's dense weights, in bfloat16",
        )
    formats = ExpertFormats.parse(weight_format)
    if experts.H % 32 or experts.I % 32:
        raise ContractError(
            "H and I do not fill whole tiles", got=f"H={experts.H}, I={experts.I}", expected="multiples of 32"
        )
    if device is None and (placement is None or split):
        device = devices.current()
    if split and (placement is not None or device is None or experts.I % (32 * device.D)):
        raise ContractError(
            "every expert's I cannot be split",
            got=f"I={experts.I}, D={device and device.D}, placement={placement}",
            expected="an open device or mesh, I / D a multiple of 32, and no placement",
            remedy="open_device(D) with a D for which I / D is a multiple of 32, and leave placement out",
        )
    if placement is None:
        placement = Placement.uniform(experts.E, 1 if device is None or split else device.D)
    if device is None:
        device = open_device(placement.D)
    device.check_open()
    if not split and (placement.E, placement.D) != (experts.E, device.D):
        raise ContractError(
            "placement does not fit experts and mesh",
            got=f"E={placement.E}, D={placement.D}",
            expected=f"E={experts.E}, D={device.D}",
            remedy=(f"Placement.uniform({experts.E}, {device.D}), or " if experts.E % device.D == 0 else "")
            + "another mesh: close_device(), then open_device(D)",
        )
    kept, shared = (None, device.D) if split else (placement, 1)
    local = experts.E if split else placement.E_local
    compute = compute or ComputeConfig()
    # raises where there is no program; what fits for K = 1 fits for other K (tests/tenstorrent/test_small_homes.py)
    programs_of(device, Sizes(experts.E, local, 1, experts.H, experts.I // shared, str(formats), compute))
    banks = device.machine.dram_banks
    order = placement.device_expert_mapping.flatten().long()
    folder = files.folder(device, cache)
    size = sum(tensor.numel() * tensor.element_size() for tensor in experts.tensors.values())
    key = None
    if folder is not None and size >= least_cached_bytes:
        about = (experts.spec, experts.sizes, str(formats), device.D, order.tolist(), split, LAYOUT, banks)
        key = files.digest(experts.tensors.values(), *about)

    def tiles(name: str) -> Any:
        """One matrix of every expert, in placement order and in the form of weights.py."""
        path = None if folder is None or key is None else folder / f"{key}-{name}.tensorbin"
        matrix = _matrix(name, experts)
        form = formats.down if name == "down" else formats.gate_up

        def make() -> Any:
            from .._planner import weight_run

            whole = matrix[order].transpose(1, 2)
            if split:  # the mapper cuts the first dimension: [D * E, ..], a device's part of every expert after another
                whole = torch.cat(whole.chunk(device.D, 1 if name == "down" else 2))
            run = weight_run(form, formats.banked, whole[0].numel() // TILE**2, banks)
            laid = in_bank_order(whole, device.D, banks, run)
            return tensors.shard(laid, device, form, "TILE", on_host=True)

        return files.kept(path, make, device)

    made = {name: tiles(name) for name in ("gate", "up", "down")}
    put = tensors.replicate if split else tensors.shard
    mapping = put(placement.device_expert_mapping, device, dtype="int32")
    return DeviceExperts(
        device, experts.E, experts.H, experts.I, formats, kept, mapping=mapping, compute=compute, **made
    )


def _check_kinds(experts: object, device: object, placement: object, compute: object) -> None:
    check_kind(experts, Experts)
    for name, value, kind, remedy in (
        ("device", device, Device, "open_device() or attach(handle), and what it returns"),
        ("placement", placement, Placement, "Placement.uniform(E, D) or Placement.from_mapping(...)"),
        ("compute", compute, ComputeConfig, "ComputeConfig(math_fidelity='HiFi3')"),
    ):
        if value is not None and not isinstance(value, kind):
            raise ContractError(
                f"{name} is of another kind", got=shown(value), expected=f"a {kind.__name__}, or None", remedy=remedy
            )


def _matrix(name: str, experts: Experts) -> Tensor:
    """[E, out, in]"""
    if name == "down":
        return experts.tensors["down"]
    both = experts.tensors["gate_up"]
    which = 0 if name == "gate" else 1
    if experts.gate_up_order == "interleaved":
        return both[:, which::2]
    return both[:, which * experts.I : (which + 1) * experts.I]
