"""Folders of what is made once and kept for later processes: compiled kernels, emulator builds, weights as tiles.

A cache saves time and decides nothing: where its folder cannot be used, callers use what they made, and one warning
says why. Folders and entries must belong to this user or root, and nobody else may be able to write them. Others are
refused. TTNN_MOE_CACHE_DIR names the folder above all caches; default: the user's cache folder.
"""

from __future__ import annotations

import os
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from .errors import ContractError, TtnnMoeError
from .whole_file import UNFINISHED, abandoned, whole_file

SETTING = "TTNN_MOE_CACHE_DIR"
WORD_S = 5.0
PATIENCE_S = 600.0
LOCK = ".ttnn-moe-lock"
LOCKS = (LOCK, ".lock")  # the second: of older versions
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_warned: set[tuple[Path, str]] = set()
_warned_lock = threading.Lock()


class CacheWarning(UserWarning):
    """A cache cannot be used as it is. The work goes on without it."""


def cache_path(name: str, setting: str = SETTING) -> Path:
    """The folder of the cache of that name: what `setting` names, else a folder below the one above all caches.

    Raises:
        ContractError: a setting begins with a home folder that does not exist.
    """
    if setting != SETTING and os.environ.get(setting):
        return _named(setting)
    return _named(SETTING) / name if os.environ.get(SETTING) else _of_user(name)


def _named(setting: str) -> Path:
    text = os.path.expanduser(os.environ[setting])
    if text.startswith("~"):
        raise ContractError(
            f"{setting} names no folder", got=repr(text), expected="a path", remedy="write it without ~: no such home"
        )
    return Path(text).absolute()


def _of_user(name: str) -> Path:
    """A folder in the user's cache folder. Without a home, one of this user right in the temporary folder: others
    could exchange what lies in a folder of theirs."""
    from platformdirs import user_cache_path

    with suppress(RuntimeError):  # what newer versions raise without a home; older ones return a relative path
        found = user_cache_path("ttnn-moe")
        if found.is_absolute():
            return found / name
    return Path(tempfile.gettempdir()) / f"ttnn-moe-{os.geteuid()}-{name}"


class CacheFolder:
    """One folder of entries, each a file that appears whole or not at all. No method raises for a folder in trouble.

    Args:
        where: made with mode 0700 when first written to.
        setting: the variable that names another folder, for remedies.
    """

    def __init__(self, where: Path, setting: str = SETTING):
        self.where, self.setting = where, setting

    def find(self, name: str) -> Path | None:
        """The entry of that name; None: it is absent, or not to be trusted."""
        if not self._trusted():
            return None
        path = self.where / name
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._unusable(error)
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        reason = _distrust(path, found)
        if reason is not None:
            self._warn("entry", "an entry of a cache is not used", got=reason, remedy=f"remove it: rm {path}")
            return None
        return path

    def keep(self, name: str, write: Callable[[Path], object], suffix: str = ".part") -> Path | None:
        """Have an entry written, and return its path. None: that failed, and a warning says why.

        Args:
            write: writes the file that it is given. An OSError of it counts as trouble of the folder.
            suffix: of the file's name meanwhile.
        """
        path = self.where / name
        try:
            self._make()
            if not self._trusted():
                return None
            path.unlink(missing_ok=True)  # whatever it was: `find` refused it
            with whole_file(path, suffix) as part:
                write(part)
                part.chmod(stat.S_IMODE(part.stat().st_mode) & stat.S_IRWXU)
        except OSError as error:
            self._unusable(error)
            return None
        self.sweep()
        return path

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """One maker of an entry at a time. Where no lock can be had, the block runs without one."""
        held = None
        try:
            self._make()
            if self._trusted():
                held = self._acquired(filelock.FileLock(self.where / f"{name}{LOCK}"), name)
        except (OSError, NotImplementedError) as error:  # the latter: filelock, on a file system without locks
            self._unusable(error)
        try:
            yield
        finally:
            if held is not None:
                # whoever waits finds the entry, or makes it in turn
                with suppress(OSError):
                    os.unlink(held.lock_file)
                held.release()

    def files(self, pattern: str) -> list[tuple[Path, os.stat_result]]:
        """Files whose names match, with what stat says of them."""
        found = []
        with suppress(OSError):
            for path in self.where.glob(pattern):
                with suppress(OSError):
                    found.append((path, path.lstat()))
        return found

    def entries(self) -> list[tuple[Path, os.stat_result]]:
        """What is kept."""
        found = self.files("[!.]*")
        return [(path, about) for path, about in found if stat.S_ISREG(about.st_mode) and path.suffix not in LOCKS]

    def unfinished(self) -> list[tuple[Path, os.stat_result]]:
        """What killed writers left."""
        return [(path, found) for path, found in self.files(UNFINISHED) if abandoned(path)]

    def sweep(self) -> None:
        """Remove what killed writers left."""
        for path, _ in [*self.files(UNFINISHED), *self.files(f"*{LOCK}")]:
            with suppress(OSError):
                if abandoned(path):
                    path.unlink()

    def distrust(self) -> str | None:
        """Why the folder is not to be trusted; None: it is, or it does not exist."""
        try:
            return _distrust(self.where, self.where.stat())
        except OSError:
            return None

    @property
    def remedy(self) -> str:
        """How a folder becomes one to be trusted."""
        return (
            f"chown and chmod 700 {self.where} after a look at what it holds, or set {self.setting} to your own folder"
        )

    def _trusted(self) -> bool:
        reason = self.distrust()
        if reason is not None:
            self._warn("folder", "a cache is not used", got=reason, remedy=self.remedy)
        return reason is None

    def _make(self) -> None:
        for path in (*reversed(self.where.parents), self.where):
            if not path.exists():
                path.mkdir(0o700, exist_ok=True)

    def _acquired(self, lock: filelock.BaseFileLock, name: str) -> filelock.BaseFileLock | None:
        for seconds, word in (
            (WORD_S, "this process waits for it"),
            (PATIENCE_S, "this process waits no longer and makes it too"),
        ):
            try:
                lock.acquire(timeout=seconds)
                return lock
            except filelock.Timeout:
                self._warn(word, f"another process makes {name}, and {word}", got=f"{lock.lock_file} locked")
        return None

    def _unusable(self, error: Exception) -> None:
        text = (isinstance(error, OSError) and error.strerror) or str(error)
        self._warn(
            "unusable",
            "a cache cannot be used, so what it should keep is made again by every process",
            got=f"{self.where}: {text}",
            expected="a folder that this user can write, with room",
            remedy=f"set {self.setting} to one",
        )

    def _warn(self, kind: str, what: str, **parts: str) -> None:
        """Once a process for each kind of trouble."""
        with _warned_lock:
            if (self.where, kind) in _warned:
                return
            _warned.add((self.where, kind))
        warnings.warn(str(TtnnMoeError(what, **parts)), CacheWarning, stacklevel=2)


def _distrust(path: Path, found: os.stat_result) -> str | None:
    if found.st_uid not in (0, os.geteuid()):
        return f"{path} of user {found.st_uid}"
    if found.st_mode & OTHERS_WRITE:
        return f"{path} that other users can write (mode {stat.S_IMODE(found.st_mode):o})"
    return None
