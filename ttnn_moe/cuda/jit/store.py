"""Compiled kernels on disk: whole or not at all, one writer a key, bounded.

They lie in kernels/ of the folder that cache_folder.py names. TTNN_MOE_CACHE_MB bounds them, by default to 512 MB: the
least recently used go first.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...cache_folder import CacheFolder, cache_path
from ...errors import ContractError
from ...sizes import natural

MAGIC = b"ttnnmoe1"
HEAD = len(MAGIC) + hashlib.sha256().digest_size
DEFAULT_MB = 512


@dataclass(frozen=True)
class Entry:
    """One kept kernel: its key, bytes on disk, time of last use (seconds since the epoch)."""

    key: str
    size: int
    used: float


def directory() -> Path:
    """Where compiled kernels are kept."""
    return cache_path("kernels")


def limit() -> int:
    """Bytes that the kept kernels may take together."""
    text = os.environ.get("TTNN_MOE_CACHE_MB") or str(DEFAULT_MB)
    size = natural(text)
    if size is None:
        raise ContractError(
            "TTNN_MOE_CACHE_MB is not a size",
            got=repr(text),
            expected="a whole number of megabytes",
            remedy=f"correct it, or unset it: {DEFAULT_MB} is the default",
        )
    return size << 20


class Store:
    """The kernels under one directory.

    Args:
        where: made when first written to; default directory().
        most: bytes; default limit().
    """

    def __init__(self, where: Path | None = None, most: int | None = None):
        self.folder = CacheFolder(directory() if where is None else where)
        self.where = self.folder.where
        self.most = limit() if most is None else most

    def read(self, key: str) -> bytes | None:
        """Code of a key; None if it is not here, not whole, or not to be trusted."""
        path = self.folder.find(f"{key}.bin")
        if path is None:
            return None
        try:
            data = path.read_bytes()
        except OSError:  # cleared meanwhile
            return None
        code = data[HEAD:]
        if data[:HEAD] != MAGIC + hashlib.sha256(code).digest():
            return None
        with suppress(OSError):
            os.utime(path)
        return code

    def get(self, key: str, build: Callable[[], bytes]) -> bytes:
        """Code of a key, built if need be: by one process, while others that want it wait.

        Where the directory cannot be used, the code is built all the same, and one CacheWarning says why.
        """
        code = self.read(key)
        if code is not None:
            return code
        with self.folder.lock(key):
            code = self.read(key)  # another process may have built it meanwhile
            if code is None:
                code = build()
                data = MAGIC + hashlib.sha256(code).digest() + code
                self.folder.keep(f"{key}.bin", lambda part: part.write_bytes(data))
        self._shrink(keep=key)
        return code

    def entries(self) -> list[Entry]:
        """What is kept, the longest unused first."""
        found = [Entry(path.stem, stat.st_size, stat.st_mtime) for path, stat in self.folder.entries()]
        return sorted(found, key=lambda entry: entry.used)

    def _shrink(self, keep: str) -> None:
        entries = self.entries()
        held = sum(entry.size for entry in entries)
        for entry in entries:
            if held <= self.most:
                return
            if entry.key != keep:
                self._remove(entry.key)
                held -= entry.size

    def _remove(self, key: str) -> None:
        with suppress(OSError):
            (self.where / f"{key}.bin").unlink()

    def clear(self) -> int:
        """Remove every kernel, and what interrupted writers left. Returns the number of kernels."""
        entries = self.entries()
        for entry in entries:
            self._remove(entry.key)
        self.folder.sweep()
        return len(entries)
