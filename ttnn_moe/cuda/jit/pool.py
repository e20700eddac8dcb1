"""Compiling many kernels at a time. NVRTC lets go of the interpreter and takes no lock, so threads suffice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

from ...errors import BackendUnavailable
from . import build
from .spec import Spec
from .store import Store


def missing(specs: Iterable[Spec], store: Store) -> list[Spec]:
    """Those that a store lacks, each once.

    Raises:
        BackendUnavailable: NVRTC is not here.
    """
    reason = build.why_not()
    if reason is not None:
        raise BackendUnavailable("kernels cannot be compiled here", got=reason)
    return [spec for spec in dict.fromkeys(specs) if store.read(build.key_of(spec)) is None]


def compile_all(specs: list[Spec], store: Store, done: Callable[[Spec], None] = lambda spec: None) -> None:
    """Compile kernels into a store, as many at a time as the machine has cores.

    Args:
        done: called in the caller's thread after each kernel.

    Raises:
        CompileError, SourceMissing, BackendUnavailable: as build.code_of. Kernels that have not begun are left out.
    """
    if not specs:
        return
    with ThreadPoolExecutor(thread_name_prefix="ttnn-moe-nvrtc") as pool:
        # those of many tokens come last and take the longest: they begin first
        made = {pool.submit(build.code_of, spec, store): spec for spec in reversed(specs)}
        try:
            for one in as_completed(made):
                one.result()
                done(made[one])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def compile_missing(specs: Iterable[Spec]) -> int:
    """Compile the kernels that this user's store lacks, several at a time; returns their number. Raises: as both."""
    store = Store()
    lacking = missing(specs, store)
    compile_all(lacking, store)
    return len(lacking)
