"""Compiling the kernels of one layer's sizes before a call needs them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace

import torch
from rich.progress import Progress

from ...activations import SILU
from ...contract import Problem
from ...errors import BackendUnavailable, ContractError
from ..arch import HOPPER, Arch, Target, asked, find, named
from ..device import H200, gpu, gpus
from ..jit import build
from ..jit.spec import Spec
from ..jit.store import Store
from .cuda_cpp import CudaCpp
from .families import CUDA_CPP, choose
from .sm120_mxfp4 import SM120_MXFP4, Sm120Mxfp4, tile_named


def target(name: str | None) -> Arch:
    """The architecture to compile for: the one named, else that of the GPU that is here, else Hopper's.

    Raises:
        ContractError: no such architecture, or none for this GPU.
    """
    if name is not None:
        return named(name)
    if not gpus():
        return HOPPER
    here = gpu()
    found = find(here, asked())
    if found is None:
        raise ContractError("there are no CUDA C++ kernels for this GPU", got=here.sm)
    return found


def specs_of(
    tokens: Iterable[int],
    E: int,
    K: int,
    H: int,
    I: int,
    dtype: torch.dtype,
    arch: Arch = HOPPER,
    weight_format: str = "dense",
    activation: str = SILU,
    tiles: Iterable[str] = (),
) -> list[Spec]:
    """The kernels of calls of these numbers of tokens, in the order of first use; for int32 and int64 ids.

    Args:
        tiles: names of tiles of mxfp4 experts on compute capability 12.x: their kernels instead, whatever the tokens.

    Raises:
        ContractError: these kernels do not serve the sizes, or have no such tiles.
    """
    found: dict[Spec, None] = {}
    target, tiles = Target(H200, arch), list(tiles)
    for T in [1] if tiles else tokens:
        problem = Problem(T, E, K, H, I, dtype, weight_format=weight_format, activation=activation)
        chosen = choose(problem, target, CUDA_CPP)
        if isinstance(chosen, str):
            raise ContractError("no CUDA C++ kernels run these sizes", got=chosen)
        family, plans = chosen.family, [chosen.plan]
        assert isinstance(family, CudaCpp)
        if tiles:
            if not isinstance(family, Sm120Mxfp4):
                raise ContractError("these kernels have no tiles to name", got=family.name, expected=SM120_MXFP4.name)
            named = [tile_named(name, family.packed) for name in tiles]
            plans = [family.plan_of(replace(problem, T=tile.M), arch, tile) for tile in named]
        for plan in plans:
            for ids64 in (False, True):
                found |= dict.fromkeys(use.spec for use in family.uses(plan, ids64, add=False))
    return list(found)


def warm_up(specs: list[Spec], store: Store | None = None) -> int:
    """Compile the kernels that the store lacks, several at a time, with a progress bar; returns their number.

    Raises:
        BackendUnavailable: NVRTC is not here.
    """
    reason = build.why_not()
    if reason is not None:
        raise BackendUnavailable("kernels cannot be compiled here", got=reason)
    store = store or Store()
    compiler = build.compiler()
    missing = [spec for spec in specs if store.read(spec.key(compiler)) is None]
    with Progress(transient=True) as progress, ThreadPoolExecutor() as pool:
        task = progress.add_task("", total=len(missing))
        made = {pool.submit(build.code_of, spec, store): spec for spec in missing}
        for done in as_completed(made):
            done.result()
            progress.update(task, description=str(made[done]), advance=1)
    return len(missing)
