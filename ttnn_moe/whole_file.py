"""Files that appear whole or not at all; pipes and devices that get all of the bytes or none."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import RequestError

# names of files that are being written, and of those that killed writers left
UNFINISHED = f".*.{'?' * 16}.part*"


@contextmanager
def whole_file(path: Path, suffix: str = ".part") -> Iterator[Path]:
    """A file to write: path gets its bytes when the block ends, and nothing if the block fails.

    A regular file is replaced and keeps its mode, also behind a symbolic link. A pipe, a character device, or an open
    descriptor such as /dev/stdout receives the bytes and stays what it is.

    Args:
        path: in a folder that exists.
        suffix: of the name meanwhile.

    Raises:
        OSError: path is a folder, a block device or a socket, or cannot be written.
    """
    descriptor = _descriptor(path)
    found = _stat(path)
    if descriptor is not None or (found is not None and not stat.S_ISREG(found.st_mode)):
        with _written_through(path, descriptor, found, suffix) as part:
            yield part
        return
    target = Path(os.path.realpath(path))
    ending = "" if suffix == ".part" else suffix
    part = target.with_name(f".{target.name[:32]}.{secrets.token_hex(8)}.part{ending}")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with suppress(OSError):  # where there are no locks, `unfinished` goes by age
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield part
        if found is not None:
            part.chmod(stat.S_IMODE(found.st_mode))
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


class _Tried(Exception):
    pass


def check_place(path: Path, option: str) -> None:
    """Begin to write a file and stop, so that a command finds out before its work; path stays what it is.

    Args:
        option: of a command, that names the path.

    Raises:
        RequestError: `whole_file` cannot write there.
    """
    try:
        with whole_file(path):
            raise _Tried
    except _Tried:
        return
    except OSError as error:
        lost = isinstance(error, FileNotFoundError) and not path.parent.exists()
        raise RequestError(
            f"{path} cannot be written",
            got=f"no folder {path.parent}" if lost else error.strerror or str(error),
            expected="a file, in a folder that this user can write to",
            remedy="make the folder, or " * lost + f"give another {option}",
        ) from error


def abandoned(path: Path) -> bool:
    """Whether no process writes a file of `whole_file`: its lock is free, or without locks, it is older than a day."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(handle).st_mtime > 86400
    finally:
        os.close(handle)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _descriptor(path: Path) -> int | None:
    """The open descriptor of this process that a path such as /dev/stdout leads to."""
    for _ in range(40):
        folder = os.path.realpath(path.parent)
        if folder == f"/proc/{os.getpid()}/fd" and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            return None
        path = Path(folder, os.readlink(path))
    return None


@contextmanager
def _written_through(path: Path, descriptor: int | None, found: os.stat_result | None, suffix: str) -> Iterator[Path]:
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if found is not None and (stat.S_ISBLK(found.st_mode) or stat.S_ISSOCK(found.st_mode)):
        raise OSError(errno.EINVAL, "a block device or a socket is no place for a file", str(path))
    if descriptor is None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    with tempfile.TemporaryDirectory() as scratch:
        part = Path(scratch) / f"output{suffix}"
        part.touch()
        yield part
        handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY) if descriptor is None else os.dup(descriptor)
        with part.open("rb") as source, os.fdopen(handle, "wb") as sink:
            shutil.copyfileobj(source, sink)
