"""Compiled kernels on disk: whole or not at all, one writer a key, bounded.

TTNN_MOE_CACHE_DIR names the directory, by default the user's cache directory. TTNN_MOE_CACHE_MB bounds it, by default
to 512. The least recently used kernels go first.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...errors import ContractError, TtnnMoeError
from ...whole_file import whole_file

MAGIC = b"ttnnmoe1"
HEAD = len(MAGIC) + hashlib.sha256().digest_size
DEFAULT_MB = 512


class CacheUnusable(TtnnMoeError, OSError):
    """The directory for compiled kernels cannot be written."""


@dataclass(frozen=True)
class Entry:
    """One kept kernel: its key, bytes on disk, time of last use (seconds since the epoch)."""

    key: str
    size: int
    used: float


def directory() -> Path:
    """Where compiled kernels are kept."""
    named = os.environ.get("TTNN_MOE_CACHE_DIR")
    if named:
        return Path(named).expanduser() / "kernels"
    from platformdirs import user_cache_path

    return user_cache_path("ttnn-moe") / "kernels"


def limit() -> int:
    """Bytes that the kept kernels may take together."""
    text = os.environ.get("TTNN_MOE_CACHE_MB", str(DEFAULT_MB))
    if not text.isdigit():
        raise ContractError("TTNN_MOE_CACHE_MB is not a size", got=repr(text), expected="a whole number of megabytes")
    return int(text) << 20


class Store:
    """The kernels under one directory.

    Args:
        where: made when first written to; default directory().
        most: bytes; default limit().
    """

    def __init__(self, where: Path | None = None, most: int | None = None):
        self.where = directory() if where is None else where
        self.most = limit() if most is None else most

    def _path(self, key: str) -> Path:
        return self.where / f"{key}.bin"

    def read(self, key: str) -> bytes | None:
        """Code of a key; None if it is not here or not whole."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unusable(error) from error
        code = data[HEAD:]
        if data[:HEAD] != MAGIC + hashlib.sha256(code).digest():
            return None
        with suppress(OSError):
            os.utime(path)
        return code

    def get(self, key: str, build: Callable[[], bytes]) -> bytes:
        """Code of a key, built if need be: by one process, while others that want it wait.

        Raises:
            CacheUnusable: the directory cannot be written.
        """
        code = self.read(key)
        if code is not None:
            return code
        from filelock import FileLock

        try:
            self.where.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.where / f"{key}.lock")
            lock.acquire()
        except OSError as error:
            raise self._unusable(error) from error
        try:
            code = self.read(key)  # another process may have built it meanwhile
            if code is None:
                code = build()
                self._write(key, code)
        finally:
            lock.release()
        self._shrink(keep=key)
        return code

    def _write(self, key: str, code: bytes) -> None:
        try:
            with whole_file(self._path(key)) as part:
                part.write_bytes(MAGIC + hashlib.sha256(code).digest() + code)
        except OSError as error:
            raise self._unusable(error) from error

    def entries(self) -> list[Entry]:
        """What is kept, the longest unused first."""
        found = []
        for path in self.where.glob("*.bin"):
            with suppress(FileNotFoundError):
                stat = path.stat()
                found.append(Entry(path.stem, stat.st_size, stat.st_mtime))
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
            self._path(key).unlink()

    def clear(self) -> int:
        """Remove every kernel, and what interrupted writers left. Returns the number of kernels."""
        entries = self.entries()
        for entry in entries:
            self._remove(entry.key)
        for pattern in ("*.lock", "*.part"):
            for path in self.where.glob(pattern):
                with suppress(OSError):
                    path.unlink()
        return len(entries)

    def _unusable(self, error: OSError) -> CacheUnusable:
        return CacheUnusable(
            "the directory of compiled kernels cannot be used",
            got=f"{self.where}: {error.strerror or error}",
            expected="a directory that this user can write",
            remedy="set TTNN_MOE_CACHE_DIR to one",
        )
