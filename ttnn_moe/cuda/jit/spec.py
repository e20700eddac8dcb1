"""What NVRTC compiles: one source file, one architecture, some macros; and the key that covers all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from ...sources import kernel_path

ROOT = ("gpu_kernels", "cuda")


@dataclass(frozen=True)
class Spec:
    """One kernel.

    Attributes:
        name: file under gpu_kernels/cuda without its ending, as in "sm90/grouped_mlp"; the entry point is an
            extern "C" function of the file's name.
        arch: as NVRTC writes it: "sm_90a", "sm_80", or "compute_80" for PTX.
        defines: names and values of macros, sorted by name.
    """

    name: str
    arch: str
    defines: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, name: str, arch: str, **defines: object) -> Spec:
        """Values are written as str() writes them; bool as 0 or 1."""
        text = {key: str(int(value) if isinstance(value, bool) else value) for key, value in defines.items()}
        return cls(name, arch, tuple(sorted(text.items())))

    @property
    def entry(self) -> str:
        """Name of the kernel function: the last part of `name`."""
        return self.name.rpartition("/")[2]

    @property
    def format(self) -> str:
        """What comes out: machine code, or PTX that the driver compiles for the GPU it finds."""
        return "ptx" if self.arch.startswith("compute_") else "cubin"

    def __str__(self) -> str:
        given = " ".join(f"{key}={value}" for key, value in self.defines)
        return f"{self.name} for {self.arch}" + (f" ({given})" if given else "")

    def key(self, compiler: str, options: Mapping[str, object]) -> str:
        """Hex digest of everything that the compiled code depends on.

        Args:
            compiler: name and version. options: that the compiler gets, without folders.
        """
        given = (*self.defines, *sorted(options.items()))
        parts = [self.name, self.arch, compiler, sources_digest(), *(f"{k}={v}" for k, v in given)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@cache
def sources_digest() -> str:
    """Digest of every source and header, as this process first found them.

    A change in one of them rebuilds every kernel, so no include is missed.
    """
    return digest_now()


def digest_now() -> str:
    """`sources_digest`, of the files as they are now."""
    digest = hashlib.sha256()
    root = kernel_path(*ROOT)
    for path in sorted(root.rglob("*.cu*")):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
