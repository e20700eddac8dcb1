"""CUDA C++ kernels on the host, launched by the same host code as on a GPU: see warp_emulator/warps.h."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from cuda_gpus import gpu_of, pretend
from paths import SUPPORT, session_folder
from ttnn_moe.cuda import maps
from ttnn_moe.cuda.jit import build, load
from ttnn_moe.cuda.jit.spec import Spec
from ttnn_moe.cuda.moe import cuda_cpp
from ttnn_moe.sources import kernel_path

GXX = shutil.which("g++")
HERE = SUPPORT / "warp_emulator"


class TensorMap(ctypes.Structure):
    """What sm90/ptx.cuh there takes for one."""

    _fields_ = (
        ("begin", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        ("sizes", ctypes.c_uint32 * 5),
        ("box", ctypes.c_uint32 * 5),
        ("strides", ctypes.c_uint64 * 5),
        ("bytes", ctypes.c_int),
    )

    @classmethod
    def of(cls, view: torch.Tensor, box: tuple[int, ...]) -> TensorMap:
        def five(values: Any, each: int = 1) -> list[int]:
            return [each * value for value in reversed(values)] + [0] * (5 - view.dim())

        made, each = cls(view.data_ptr(), view.dim()), view.element_size()
        made.sizes[:], made.box[:], made.strides[:] = five(view.shape), five(box), five(view.stride(), each)
        made.bytes = each
        return made


def used(host: HostKernels, monkeypatch: pytest.MonkeyPatch, *cached: Any) -> HostKernels:
    """host, which runs the kernels where there is no GPU. cached: functions that keep launches, which they forget."""
    if not torch.cuda.is_available():
        host.use(monkeypatch)
    for function in cached:
        function.cache_clear()
    return host


class HostKernels:
    """Kernels built for the host, once a test session for each set of definitions; stands in for launching.

    Args:
        where: a folder for what is built from `sources`.
        late: whether copies land, and products are made, as late as they may; and the last thread begins.
        sources: another source for some kernels. together: clusters of a kernel that run at a time, at most.
        resident: blocks that the GPU is said to run at a time.

    Attributes:
        sound: no thread did what no thread may.
        traces: by kernel, what thread 0 of the last launch did: see emulator::note.
    """

    def __init__(
        self,
        where: Path,
        late: bool = False,
        sources: dict[str, Path] | None = None,
        together: int = 1,
        resident: int = 3,
    ):
        self.where, self.late, self.sources, self.together = where, late, sources or {}, together
        self.resident = resident
        self.sound = True
        self.traces: dict[str, str] = {}

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(load, "Launch", self._bind)
        monkeypatch.setattr(build, "why_not", lambda: None)
        monkeypatch.setattr(maps, "_map", TensorMap.of)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(load, "stream", lambda device: None)
        monkeypatch.setattr(load, "resident_blocks", lambda *_: self.resident)
        pretend(monkeypatch, gpu_of((9, 0), multiprocessors=4))
        cuda_cpp.launches.cache_clear()

    def _bind(
        self,
        spec: Spec,
        device: int,
        grid: tuple[int, ...],
        block: int,
        *last: Any,
        shared_memory: int = 0,
        carveout: int | None = None,
        cluster: int = 1,
        overlap: bool = False,
    ):
        """In place of load.Launch."""

        def run(stream: None, *given: int | TensorMap) -> None:
            values = [*(value if isinstance(value, TensorMap) else ctypes.c_void_p(value) for value in given), *last]
            places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
            x, y, z = (*grid, 1, 1)[:3]
            together = next(n for n in range(min(self.together, x // cluster), 0, -1) if x // cluster % n == 0)
            sizes = x, y, z, block, cluster, together * cluster, shared_memory, int(self.late)
            library = self.library(spec)
            self.sound &= bool(library.run(places, *sizes))
            self.traces[spec.name] = library.trace().decode()

        return run

    def library(self, spec: Spec) -> ctypes.CDLL:
        source = self.sources.get(spec.name, Path(f"{spec.name}.cu"))
        where = self.where if spec.name in self.sources else session_folder()
        return _library(where, source, spec.entry, spec.defines)


@functools.cache
def _library(where: Path, source: Path, entry: str, defines: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    """One process of the session builds it; the others load what lies there."""
    digest = hashlib.sha256(repr((source, entry, defines)).encode()).hexdigest()
    path, header = where / f"{digest[:24]}.so", _prelude()
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            every = {**dict(defines), "KERNEL": f'"{source}"', "ENTRY": entry}
            options = [f"-D{name}={value}" for name, value in every.items()]
            options += ["-include", str(header), str(HERE / "launch.cpp"), str(header.with_name("warps.o"))]
            _compile("-shared", "-Wl,-Bsymbolic", *options, "-o", str(path))
    library = ctypes.CDLL(str(path))
    library.trace.restype = ctypes.c_char_p
    return library


@functools.cache
def _prelude() -> Path:
    """A precompiled header, and warps.o beside it: most of a kernel's compilation is not the kernel."""
    header = session_folder() / "emulator.h"
    last = header.with_name("warps.o")
    with FileLock(header.with_suffix(".lock")):
        if not last.exists():
            header.write_text('#include "warps.h"\n')
            _compile("-x", "c++-header", str(header), "-o", f"{header}.gch")
            _compile("-include", str(header), "-c", str(HERE / "warps.cpp"), "-o", str(last))
    return header


def _compile(*arguments: str) -> None:
    # Ubuntu's g++ defines _FORTIFY_SOURCE, whose longjmp refuses another stack, and one header serves one value only
    flags = "-Og -std=c++20 -fPIC -Wall -Werror -Wno-unknown-pragmas -Winvalid-pch -U_FORTIFY_SOURCE".split()
    flags += [f"-I{folder}" for folder in (HERE, kernel_path("gpu_kernels", "cuda"))]
    done = subprocess.run([str(GXX), *flags, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def with_mistake(where: Path, name: str, line: str, instead: str, source_file: Path | None = None) -> dict[str, Path]:
    """`sources` of HostKernels: a kernel with one line changed, its own or of a header.

    source_file: of a kernel that is not under gpu_kernels/cuda.
    """
    return with_mistakes(where, name, [(line, instead)], source_file)


def with_mistakes(
    where: Path,
    name: str,
    mistakes: Iterable[tuple[str, str]],
    source_file: Path | None = None,
    without: Iterable[str] = (),
) -> dict[str, Path]:
    """As with_mistake, of several lines. without: headers that are left out."""
    source = _whole(f"{name}.cu", set(without), source_file)
    for line, instead in mistakes:
        assert line in source
        source = source.replace(line, instead)
    wrong = where / "wrong.cu"
    wrong.write_text(source)
    return {name: wrong}


def _whole(name: str, seen: set[str], file: Path | None = None) -> str:
    """A source with its headers in place, but those that the emulator replaces."""
    lines = []
    for line in (file or kernel_path("gpu_kernels", "cuda", *name.split("/"))).read_text().splitlines():
        header = line.split('"')[1] if line.startswith('#include "') else None
        if header is None or (HERE / header).exists():
            lines.append(line)
        elif header not in seen:
            seen.add(header)
            lines.append(_whole(header, seen))
    return "\n".join(lines).replace("#pragma once", "")
