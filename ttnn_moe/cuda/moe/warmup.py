"""Compiling the kernels of one layer's sizes before a call needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import torch

from ...activations import SILU
from ...contract import Problem
from ...errors import ContractError
from ..arch import HOPPER, Arch, Target, asked, find, named, stands_for
from ..device import H200, gpu, gpus
from ..jit import pool
from ..jit.spec import Spec
from ..jit.store import Store
from .cuda_cpp import CudaCpp
from .families import CUDA_CPP, Chosen, choose
from .mxfp4_activations import ENV
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
        raise ContractError(
            "there are no CUDA C++ kernels for this GPU",
            got=here.sm,
            remedy="nothing to warm up: its Triton kernels compile at their first call; --arch names another GPU",
        )
    return found


def _target_of(arch: Arch) -> Target:
    """What kernels of an architecture are chosen for: the GPU that is here if it runs them, with its tuned tiles."""
    if gpus() and find(gpu(), asked()) == arch:
        return Target(stands_for(gpu()), arch)
    return Target(H200, arch)


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
    """The kernels of calls of these numbers of tokens, in the order of first use.

    For int32 and int64 ids, and for calls that add to out. A call with an fp32 out compiles its last kernel by itself.

    Args:
        activation: another than "silu" is that of experts with biases, as gpt-oss has them.
        tiles: names of tiles of mxfp4 experts on compute capability 12.x: their kernels instead, whatever the tokens.

    Raises:
        ContractError: these kernels do not serve the sizes, or have no such tiles.
    """
    found: dict[Spec, None] = {}
    target, tiles = _target_of(arch), list(tiles)
    for T in [1] if tiles else tokens:
        form = {"weight_format": weight_format, "activation": activation, "biased": activation != SILU}
        problem = Problem(T, E, K, H, I, dtype, **form)  # type: ignore[arg-type]
        chosen = choose(problem, target, CUDA_CPP)
        if isinstance(chosen, str):
            raise ContractError(
                "no CUDA C++ kernels run these sizes",
                got=chosen,
                remedy="`ttnn-moe why` says what runs them; Triton kernels compile at their first call"
                if activation == SILU
                else f"--format mxfp4 for {activation}",
            )
        family, plans = chosen.family, [chosen.plan]
        assert isinstance(family, CudaCpp)
        if tiles:
            if not isinstance(family, Sm120Mxfp4):
                raise ContractError(
                    "these kernels have no tiles to name",
                    got=family.name,
                    expected=SM120_MXFP4.name,
                    remedy=f"no tiles; or mxfp4 experts, sm_120f and no {ENV}=bf16",
                )
            named = [tile_named(name, family.packed) for name in tiles]
            plans = [family.plan_of(replace(problem, T=tile.M), arch, tile) for tile in named]
        for plan in plans:
            for ids64, add in product((False, True), repeat=2):
                found |= dict.fromkeys(use.spec for use in family.uses(plan, ids64, add))
    return list(found)


def sizes_up_to(T: int, least: int = 1) -> Iterator[int]:
    """Numbers of tokens from least to T: plans change at sizes that lie further apart than these."""
    size = least
    while size < T:
        yield size
        size += max(1, size // 64)
    yield T


def specs_up_to(problem: Problem, target: Target, least: int = 1, ids64: bool = False, add: bool = False) -> list[Spec]:
    """The CUDA C++ kernels of calls of `least` to problem.T tokens; Triton compiles its own.

    Args:
        ids64: int64 ids, else int32. add: calls add to out.
    """
    found: dict[Spec, None] = {}
    for T in sizes_up_to(max(problem.T, 1), least):
        chosen = choose(replace(problem, T=T), target)
        if isinstance(chosen, Chosen) and isinstance(chosen.family, CudaCpp):
            found |= dict.fromkeys(use.spec for use in chosen.family.uses(chosen.plan, ids64, add))
    return list(found)


_MADE: set[tuple[object, ...]] = set()


def compile_up_to(problem: Problem, target: Target, least: int = 1, ids64: bool = False, add: bool = False) -> int:
    """Compile the kernels of specs_up_to that the store lacks, several at a time; returns their number.

    A process does it once for each problem: layers of one problem need the same kernels.
    """
    key = problem, target, least, ids64, add
    if target.arch is None or key in _MADE:
        return 0
    made = pool.compile_missing(specs_up_to(*key))
    _MADE.add(key)
    return made


def warm_up(specs: list[Spec], store: Store | None = None) -> int:
    """Compile the kernels that the store lacks, several at a time, with a progress bar; returns their number.

    Raises:
        BackendUnavailable: NVRTC is not here.
    """
    from rich.progress import Progress

    store = store or Store()
    lacking = pool.missing(specs, store)
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(lacking))
        pool.compile_all(lacking, store, lambda spec: progress.update(task, description=str(spec), advance=1))
    return len(lacking)
