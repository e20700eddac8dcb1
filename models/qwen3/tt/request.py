"""What a command line may ask of the device, checked before weights are read."""

from __future__ import annotations

import re

from ttnn_moe import Placement, registry
from ttnn_moe.errors import BackendUnavailable, RequestError
from ttnn_moe.tenstorrent import device as devices

from ..config import Qwen3MoeConfig
from .cache import check_rows
from .weights import check_sizes

NAME = "tenstorrent"


def asked_for(backend: str, device: str | None) -> bool:
    """Whether a model is to run on the device: it is named, or "auto" chooses it."""
    return backend == NAME or (backend == registry.AUTO and device is None and registry.resolve(backend) == NAME)


def chips_of(mesh: str | None) -> int:
    """D of "1xD"; one without a mesh.

    Raises:
        RequestError: another form.
    """
    found = re.fullmatch(r"1x([1-9]\d{0,3})", mesh if mesh is not None else "1x1")
    if found is None:
        raise RequestError("--mesh has the wrong form", got=repr(mesh), expected="1xD, as in 1x8")
    return int(found[1])


def check(config: Qwen3MoeConfig, rows: int, mesh: str | None, device: str | None, dtype: str | None) -> int:
    """Chips of the mesh, if this can run.

    Raises:
        RequestError: a mesh of another form, another dtype than bfloat16, more sequences than run at a time.
        BackendUnavailable: no such device here.
        CheckpointError, ContractError: sizes that do not fit the device, or experts that the chips cannot share.
    """
    D = chips_of(mesh)
    if dtype not in (None, "bfloat16"):
        raise RequestError("the device runs the model in bfloat16", got=f"--dtype {dtype}", remedy="leave it out")
    check_rows(rows)
    check_device(device)
    check_sizes(config)
    if config.num_experts:
        Placement.uniform(config.num_experts, D)
    return D


def check_device(device: str | None) -> None:
    """Raise BackendUnavailable where it is not."""
    found = devices.probe(device)
    if not found.available:
        raise BackendUnavailable(f"backend {NAME!r} cannot run here", got=found.reason, remedy=found.remedy)
