"""Checks of a command line's options for Tenstorrent, before weights are read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ttnn_moe import registry
from ttnn_moe.arguments import FLOATS
from ttnn_moe.errors import BackendUnavailable, RequestError
from ttnn_moe.kv.formats import EIGHT_BITS, PAGED
from ttnn_moe.tenstorrent import device as devices
from ttnn_moe.tenstorrent.balance import prefer_split
from ttnn_moe.tenstorrent.runtime import is_emulator
from ttnn_moe.tenstorrent.weight_formats import ModelFormats

from ..config import Qwen3MoeConfig
from ..runtime.language_model import LanguageModel
from .cache import check_kv, check_rows
from .decode import check_trace
from .model import Qwen3MoeTT
from .profile import Profile, prepare
from .profile import profiled as profile_of
from .sizes import check_mesh
from .weights import TILE, check_sizes

NAME = "tenstorrent"
PLACES = ("placed", "split")


def asked_for(backend: str, device: str | None) -> bool:
    """Whether a command line means this backend: by name, or because "auto" resolves to it."""
    return backend == NAME or (backend == registry.AUTO and device is None and registry.resolve(backend) == NAME)


def chips_of(mesh: str | None) -> int:
    """D of a mesh "1xD"; 1 without a mesh.

    Raises:
        RequestError: another form.
    """
    found = re.fullmatch(r"1x([1-9]\d{0,3})", mesh if mesh is not None else "1x1")
    if found is None:
        raise RequestError("--mesh has the wrong form", got=repr(mesh), expected="1xD, as in 1x8")
    return int(found[1])


@dataclass(frozen=True)
class Options:
    """Options of a command line: --mesh, --device, --dtype, --trace, --profile, --weights, --experts, --kv."""

    mesh: str | None = None
    device: str | None = None
    dtype: str | None = None
    trace: bool | None = None
    profile: bool = False
    weights: str | None = None
    experts: str | None = None
    kv: str = PAGED

    def refuse(self, backend: str, parallel: str | None = None) -> int:
        """0 chips, for another backend or several processes.

        Raises:
            RequestError: an option is set that only Tenstorrent has, in one process.
        """
        # an empty text and --no-trace are given, too
        given = [name for name in ("mesh", "trace", "weights", "experts") if getattr(self, name) is not None]
        given = ["no-trace" if name == "trace" and not self.trace else name for name in given]
        given += ["profile"] * self.profile + ["kv"] * (self.kv == EIGHT_BITS)
        if given:
            raise RequestError(
                f"--{given[0]} is of backend {NAME}" + (", in one process" if parallel else ""),
                got=f"--parallel {parallel}" if parallel else f"--backend {backend}",
                remedy=f"leave it out, or choose --backend {NAME}" + (" without --parallel" if parallel else ""),
            )
        return 0


def check(config: Qwen3MoeConfig, rows: int, options: Options) -> int:
    """Chips of the mesh that the model will run on.

    Raises:
        RequestError: a mesh of another form, another dtype than bfloat16, more than 32 sequences, a KV cache that
            the chips do not have, or a trace or a profile where the device has none.
        BackendUnavailable: this machine has no such device.
        CheckpointError, ContractError: sizes that do not fit the device; experts or heads that the chips cannot share.
    """
    D = chips_of(options.mesh)
    if options.dtype is not None and FLOATS.get(options.dtype) != torch.bfloat16:
        raise RequestError(
            "the device runs the model in bfloat16",
            got=f"--dtype {options.dtype}",
            expected="bfloat16",
            remedy="leave --dtype out",
        )
    check_rows(rows)
    check_device(options.device)
    check_sizes(config)
    if options.kv != PAGED:
        check_kv(options.kv)
    ModelFormats.parse(options.weights or "", config.num_hidden_layers)
    check_mesh(config, D, splits(config, rows, options))
    if options.trace:
        if options.profile:
            raise RequestError("a replayed trace has no operators to time", remedy="--trace or --profile, not both")
        check_trace(options.device)
    if options.profile:
        prepare(options.device)
    return D


def splits(config: Qwen3MoeConfig, rows: int, options: Options) -> bool:
    """Whether --experts says that every chip holds a part of each expert; auto: as decode steps of `rows` tokens read.

    Raises:
        RequestError: another word, or experts that the chips cannot split.
    """
    D, E, I = chips_of(options.mesh), config.num_experts, config.moe_intermediate_size
    if options.experts == "auto":
        return bool(E) and prefer_split(E, config.num_experts_per_tok, D, rows, I)
    if options.experts not in (None, *PLACES) or (options.experts == "split" and E and I % (TILE * D)):
        raise RequestError(
            "--experts cannot be had",
            got=f"--experts {options.experts}, {D} chips, moe_intermediate_size {I}",
            expected="placed, auto, or split where moe_intermediate_size / chips is a multiple of 32",
        )
    return options.experts == "split"


def quiet() -> None:
    """Silence ttnn's log of program launches: it would go to stdout, between the generated text."""
    os.environ.setdefault("TT_LOGGER_LEVEL", "warn")


@contextmanager
def profiled(model: LanguageModel, wanted: bool) -> Iterator[Profile | None]:
    """Time the model's operators inside the `with` block, if wanted."""
    if not wanted:
        yield None
        return
    assert isinstance(model, Qwen3MoeTT)
    with profile_of(model.mesh) as found:
        yield found


def check_device(device: str | None) -> None:
    """Raise RequestError for an unknown device, BackendUnavailable if this machine lacks it."""
    if device and not is_emulator(device):
        raise RequestError(
            f"no device {device} of backend {NAME}",
            got=f"--device {device}",
            expected="emulator, emulator:n150, or no --device for a card or simulator",
        )
    found = devices.probe(device)
    if not found.available:
        raise BackendUnavailable(f"backend {NAME!r} cannot run here", got=found.reason, remedy=found.remedy)
