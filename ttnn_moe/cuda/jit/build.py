"""From a Spec to machine code: by NVRTC through cuda.core, or from the store."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from threading import Lock
from typing import Any

from ...errors import BackendUnavailable, TtnnMoeError
from ...logs import logger
from ...packages import install
from ...sources import kernel_path
from .spec import ROOT, Spec, digest_now, sources_digest
from .store import Store


class CompileError(TtnnMoeError, RuntimeError):
    """NVRTC refused a kernel source."""


_importing = Lock()


def cuda_core() -> Any:
    """The module cuda.core. Threads that import it at the same time may find it half made."""
    with _importing:
        return importlib.import_module("cuda.core")


@cache
def why_not() -> str | None:
    """Why kernels cannot be compiled here, or None."""
    for package, remedy in (("cuda.core", install("cuda")), ("cuda.bindings", "pip install 'cuda-core[cu13]'")):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"{package} is not installed; to fix it: {remedy}"
    try:
        compiler()
    except Exception as error:  # what the loader raises differs with what is missing
        return f"NVRTC cannot be loaded ({' '.join(str(error).split())}); to fix it: pip install 'cuda-core[cu13]'"
    return None


@cache
def compiler() -> str:
    """Name and version of the compiler."""
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    if int(status):
        raise BackendUnavailable("NVRTC does not answer", got=status, remedy="pip install 'cuda-core[cu13]'")
    return f"nvrtc {major}.{minor}"


def options(spec: Spec) -> dict[str, object]:
    """Arguments of cuda.core's ProgramOptions."""
    return {
        "arch": spec.arch,
        "std": "c++17",
        "include_path": [str(kernel_path(*ROOT))],
        "define_macro": [(name, value) for name, value in spec.defines] or None,
        "name": f"{spec.name}.cu",
    }


def key_of(spec: Spec) -> str:
    """The key of a kernel in the store. The folder of the headers is no part of it: their digest is."""
    given = {name: value for name, value in options(spec).items() if name != "include_path"}
    return spec.key(compiler(), given)


def compile_spec(spec: Spec) -> bytes:
    """Machine code (or PTX) of a kernel, compiled now.

    Raises:
        CompileError: with the compiler's log.
        SourceMissing: no such file.
    """
    core = cuda_core()
    source = kernel_path(*ROOT, f"{spec.name}.cu").read_text()
    try:
        code = core.Program(source, "c++", core.ProgramOptions(**options(spec))).compile(spec.format).code
    except Exception as error:
        log = str(error).rstrip("\0\n ")
        raise CompileError(f"NVRTC cannot compile {spec}", got=log, remedy="report this; it is a bug") from error
    return code if isinstance(code, bytes) else bytes(code, "ascii")


def code_of(spec: Spec, store: Store | None = None) -> bytes:
    """Code of a kernel: from the store, else compiled and kept.

    Raises:
        CompileError, SourceMissing: as compile_spec. BackendUnavailable: a source changed since the process began.
    """

    def build() -> bytes:
        logger.debug("pid {} compiles {}", os.getpid(), spec)
        try:
            return compile_spec(spec)
        finally:
            _check_sources()

    return (store or Store()).get(key_of(spec), build)


def _check_sources() -> None:
    """Refuse code of other sources than those that the store's keys, and this process's launches, are of."""
    if digest_now() != sources_digest():
        raise BackendUnavailable(
            "the sources of CUDA kernels changed since this process began",
            got=f"other files in {kernel_path(*ROOT)}",
            expected="an installation that stays as it is while a process runs",
            remedy="start the process again",
        )
