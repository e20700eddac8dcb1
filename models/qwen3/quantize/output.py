"""The directory that a conversion writes: shards that know what made them, config.json last.

A directory without config.json is no checkpoint. A conversion that was killed leaves whole shards, perhaps an
unfinished hidden file, and the file UNFINISHED that says which conversion it was.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from ttnn_moe.errors import CheckpointError, RequestError
from ttnn_moe.visible import shown
from ttnn_moe.whole_file import UNFINISHED as PARTS
from ttnn_moe.whole_file import whole_file

from ..checkpoint import INDEX
from ..files import Fields, reading
from ..shards import examined, packed
from ..weight_formats import UNFINISHED

CONFIG = "config.json"
DIFFERS = {
    "model": "another model (its config.json or a byte of its weights)",
    "calibration": "another calibration (its text, --tokens or the tokenizer)",
    "version": "another version of the format",
}
"""What a difference in `made_by` means, in words."""

_NO_SYNC = errno.EINVAL, errno.ENOTSUP, errno.ENOSYS
"""What fsync says on file systems without it, such as of directories on a network share."""
_ELSEWHERE = "another --out, or remove the directory"


def check_out(out: Path, source: Path) -> None:
    """Check that a conversion can write the directory `out`; nothing is made.

    Raises:
        RequestError: it is the source, a file or a link to nothing, holds no conversion but other files, or it is in a
            place that this user cannot write to.
    """
    try:
        if os.path.realpath(out) == os.path.realpath(source):  # Path.resolve raises of a loop of links
            raise RequestError(f"{out} cannot be written", got="the model itself", expected="another directory")
        near = next(path for path in (out, *out.parents) if path.is_symlink() or path.exists())
        if not near.is_dir():
            kind = "a file" if near.exists() else f"a link to {os.readlink(near)}, which is not there"
            raise RequestError(f"{out} cannot be written", got=f"{near}, {kind}", expected="another directory")
        if out.is_dir():
            _held(out)
        reason = None if os.access(near, os.W_OK | os.X_OK) else f"{near}: {os.strerror(_why_not(near))}"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason is not None:
        raise unwritable(out, reason)


def _why_not(directory: Path) -> int:
    """Why this user cannot write there, in the numbers of errno: os.access does not say."""
    return errno.EROFS if os.statvfs(directory).f_flag & os.ST_RDONLY else errno.EACCES


def unwritable(out: Path, reason: str) -> RequestError:
    """The error for a directory that cannot be made, or written where it exists."""
    return RequestError(
        f"the directory {out} cannot be {'written' if os.path.isdir(out) else 'made'}",
        got=reason,
        expected="a place that this user can write to",
        remedy="give another --out",
    )


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise RequestError, which names the path, where the disk does not take what the block writes."""
    try:
        yield
    except OSError as error:
        expected, first = None, ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            expected, first = "room on the disk", "make room, and "
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            expected, first = "a directory that this user can write to", "make it writable, and "
        raise RequestError(
            f"{path} cannot be written",
            got=error.strerror or str(error),
            expected=expected,
            remedy=f"{first}convert again with the same arguments: whole shards are kept; or give another --out",
        ) from error


def _held(directory: Path) -> Mapping[str, Any] | None:
    """What made the conversion in a directory; None: the directory is empty.

    Raises:
        RequestError: it holds anything else.
    """
    marker, config = directory / UNFINISHED, directory / CONFIG
    names = sorted(path.name for path in directory.iterdir() if not path.match(PARTS))
    if not names:
        return None
    held: Mapping[str, Any] = {}
    if config.is_file():
        try:
            held = Fields.of_file(config).fields("quantization_config").values
        except CheckpointError as error:
            raise CheckpointError(error.what, got=error.got, expected=error.expected, remedy=_ELSEWHERE) from error
    elif marker.is_file():
        held = Fields.of_file(marker).values
    if not held:
        raise RequestError(
            f"{directory} holds other files",
            got=f"{CONFIG} of a model that is not quantised" if config.is_file() else shown(names[:5]),
            expected="an empty directory, or none",
            remedy=_ELSEWHERE,
        )
    return held


class Output:
    """A directory that one conversion fills.

    Args:
        directory: made if it is missing.
        made_by: what decides every byte: format, version, model, calibration; JSON values.
    """

    def __init__(self, directory: Path, made_by: Mapping[str, Any]):
        self.directory, self.made_by = directory, dict(made_by)
        self.conversion = hashlib.sha256(json.dumps(self.made_by, sort_keys=True).encode()).hexdigest()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Take the directory, alone. One that it made and that fails empty is removed.

        Raises:
            RequestError: it cannot be made or written, holds something else, or another conversion writes to it.
        """
        made = not self.directory.exists()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise unwritable(self.directory, error.strerror or str(error)) from error
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RequestError(
                    f"{self.directory} is being written",
                    got="another conversion, in this process or in another",
                    expected="one conversion at a time",
                    remedy="wait for it to end, or give another --out",
                ) from None
            except OSError:  # a file system without locks
                pass
            self._check_ours()
            with _writing(self.directory):
                for part in self.directory.glob(PARTS):
                    part.unlink()
            yield
        except BaseException:
            if made:
                with suppress(OSError):  # it holds shards
                    self.directory.rmdir()
            raise
        finally:
            os.close(handle)

    def begin(self) -> None:
        """Say in the directory which conversion it holds, unless it is a checkpoint already."""
        if not (self.directory / CONFIG).exists():
            self.write_json(UNFINISHED, self.made_by)

    def _check_ours(self) -> None:
        """Raise RequestError unless the directory is empty or holds this conversion."""
        held = _held(self.directory)
        if held is None or held == self.made_by:
            return
        differs = sorted(key for key in {*held, *self.made_by} if held.get(key) != self.made_by.get(key))
        got, wanted = (", ".join(f"{key} {by.get(key) or 'none'}" for key in differs) for by in (held, self.made_by))
        parts = [DIFFERS.get(key, f"another {key}") for key in differs]
        what = f"{self.directory} holds another conversion, with {' and '.join(parts)}"
        raise RequestError(what, got=got, expected=wanted, remedy=_ELSEWHERE)

    def has(self, name: str) -> bool:
        """Whether the shard is there, of this conversion, and whole: its bytes have the checksum that it was given.

        Raises:
            RequestError: it is of another conversion.
        """
        path = self.directory / name
        try:
            conversion, whole = examined(path)
        except CheckpointError:  # absent or truncated, or its header is damaged
            return False
        if conversion != self.conversion:
            raise RequestError(
                f"{path} is of another conversion", got=shown(conversion), expected=self.conversion, remedy=_ELSEWHERE
            )
        return whole

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a shard."""
        with reading(self.directory / name), safe_open(self.directory / name, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}

    def write_shard(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors as a safetensors file of that name."""
        self.write_bytes(name, packed(tensors, self.conversion))

    def write_json(self, name: str, value: object) -> None:
        """Write a value as an indented JSON file of that name."""
        self.write_bytes(name, json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")

    def write_bytes(self, name: str, content: bytes) -> None:
        """The file appears whole and survives a power cut, or not at all.

        Raises:
            RequestError: the disk does not take it.
        """
        with _writing(self.directory / name):
            with whole_file(self.directory / name) as part:
                part.write_bytes(content)
                _sync(part)
            _sync(self.directory)

    def finish(self, config: Mapping[str, Any], weight_map: Mapping[str, str], nbytes: int) -> None:
        """Make the directory a checkpoint. config: of the source, without quantization_config."""
        index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        self.write_json(INDEX, index)
        self.write_json(CONFIG, {**config, "quantization_config": self.made_by})
        with _writing(self.directory):
            (self.directory / UNFINISHED).unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until a file or directory is on the disk, where its file system can say so."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(handle)
