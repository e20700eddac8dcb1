"""Compiling, before they are needed, the kernels of one layer's sizes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from rich.progress import Progress

from ...errors import BackendUnavailable, ContractError
from ..arch import HOPPER, Arch, asked, find, named
from ..device import gpu
from ..jit import build
from ..jit.spec import Spec
from ..jit.store import Store
from . import plan
from .specs import Types, uses_of


def target(name: str | None) -> Arch:
    """The architecture to compile for: the one named, else that of the GPU that is here, else Hopper's.

    Raises:
        ContractError: no such architecture, or none for this GPU.
    """
    if name is not None:
        return named(name)
    if not torch.cuda.is_available():
        return HOPPER
    here = gpu()
    found = find(here, asked())
    if found is None:
        raise ContractError("there are no CUDA C++ kernels for this GPU", got=here.sm)
    return found


def specs_of(
    tokens: Iterable[int], E: int, K: int, H: int, I: int, dtype: torch.dtype, arch: Arch = HOPPER
) -> list[Spec]:
    """What calls of up to the given numbers of tokens launch, in the order of first use; int32 and int64 ids.

    Raises:
        ContractError: these kernels do not serve the sizes.
    """
    reason = plan.why_not(1, E, K, H, I, dtype.itemsize, arch)
    if reason is not None:
        raise ContractError("no CUDA C++ kernels are launched for these sizes", got=reason)
    found: dict[Spec, None] = {}
    for T in tokens:
        for ids64 in (False, True):
            for use in uses_of(plan.choose(T, E, K, arch), E, K, Types(dtype == torch.float16, ids64)):
                found[use.spec] = None
    return list(found)


def warm_up(specs: list[Spec], store: Store | None = None) -> int:
    """Compile what the store lacks, with a progress bar; the number of kernels that were compiled.

    Raises:
        BackendUnavailable: NVRTC is not here.
    """
    reason = build.why_not()
    if reason is not None:
        raise BackendUnavailable("kernels cannot be compiled here", got=reason)
    store = store or Store()
    compiler = build.compiler()
    missing = [spec for spec in specs if store.read(spec.key(compiler)) is None]
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(missing))
        for spec in missing:
            progress.update(task, description=str(spec))
            build.code_of(spec, store)
            progress.advance(task)
    return len(missing)
