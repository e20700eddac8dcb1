"""The boundary to a checkpoint's files: what a parser raises becomes a CheckpointError with the file and the field."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ttnn_moe.errors import CheckpointError, TtnnMoeError
from ttnn_moe.visible import said, shown

MOST_BYTES = 256 << 20
"""Of a text file: far above the largest tokenizer.json."""
_NO_MEMORY = re.compile("(Cannot|can't) allocate memory")


def path_of(
    path: object,
    refusal: str = "no directory of a checkpoint",
    remedy: str = "name the directory that holds config.json",
) -> Path:
    """The path that a caller gives: of a checkpoint's directory, where `refusal` and `remedy` say nothing else.

    Raises:
        CheckpointError: no path, not in UTF-8, or with a null character.
    """
    if isinstance(path, str | os.PathLike):
        if "\0" in os.fsdecode(path):
            raise CheckpointError(
                f"the path {path} names no file", got="a null character", expected="a path without one", remedy=remedy
            )
        try:
            os.fsdecode(path).encode()
        except UnicodeEncodeError:
            raise CheckpointError(
                f"the path {path} is not in UTF-8", expected="a path in UTF-8: safetensors reads no other"
            ) from None
        return Path(path)
    raise CheckpointError(refusal, got=shown(path), expected="a path, as str or pathlib.Path", remedy=remedy)


def is_file(path: Path) -> bool:
    """Whether a regular file is there, or a link to one; False: nothing is.

    Raises:
        CheckpointError: something else is there, as a directory or a link to nothing.
    """
    if path.is_file():
        return True
    if path.is_dir():
        kind = "a directory"
    elif path.exists():
        kind = "no regular file"
    elif path.is_symlink():
        kind = f"a link to {path.readlink()}, which is not there"
    else:
        return False
    raise CheckpointError(f"{path} is {kind}", expected="a file", remedy="download or copy it again")


@contextmanager
def reading(path: Path, refusal: str = "cannot be read", remedy: str | None = None) -> Iterator[None]:
    """Turn whatever the block raises into one CheckpointError: "PATH cannot be read; got RecursionError: ...".

    This package's own errors pass, and so do KeyboardInterrupt and its like.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, TtnnMoeError) or not is_failure(error):
            raise
        if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):  # the file may be sound
            refusal, remedy = "cannot be read", "free memory, or raise the limit of this process (ulimit -v)"
        raise CheckpointError(f"{path} {refusal}", got=said(error), remedy=remedy) from error


def is_failure(error: BaseException) -> bool:
    """Whether an exception says that something failed. Rust's panics say so, though they are no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def read_text(path: Path, remedy: str | None = None, most: int | None = None) -> str:
    """The text of a file.

    Args:
        remedy: for a file that cannot be read.
        most: characters; the rest is not read, so a file may be of any size, and a pipe without an end.

    Raises:
        CheckpointError: unreadable, not UTF-8, or larger than MOST_BYTES.
    """
    with reading(path, remedy=remedy):
        if most is None or most > MOST_BYTES:
            _check_size(path)
        try:
            with path.open(encoding="utf-8") as file:
                return file.read(None if most is None else min(most, MOST_BYTES))
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{path} is not UTF-8 text",
                got=said(error),
                remedy="save the file again as UTF-8, or download it again",
            ) from None


def read_json(path: Path) -> str:
    """The text of a JSON file.

    Raises:
        CheckpointError: as `read_text`; or it begins with a byte-order mark, which JSON forbids.
    """
    text = read_text(path)
    if text.startswith("\ufeff"):
        raise CheckpointError(
            f"{path} begins with a byte-order mark",
            expected="UTF-8 without one",
            remedy="save the file again without it",
        )
    return text


def read_bytes(path: Path) -> bytes:
    """The bytes of a file. Raises CheckpointError as `read_text`."""
    with reading(path):
        _check_size(path)
        return path.read_bytes()


def _check_size(path: Path) -> None:
    if (size := path.stat().st_size) > MOST_BYTES:
        raise CheckpointError(f"{path} is too large", got=f"{size} bytes", expected=f"at most {MOST_BYTES}")


def size(count: int) -> str:
    """A number of bytes for people, in the largest unit that it reaches."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} bytes"


class Fields:
    """A JSON object whose fields are read by type. A field that is null counts as absent.

    Attributes:
        values: the object. source: the file, as errors name it.

    Raises:
        CheckpointError: from each method, where the field is absent without a default, or has another type.
    """

    def __init__(self, values: Mapping[str, Any], source: str | Path):
        self.values, self.source = values, source

    @classmethod
    def of_file(cls, path: Path) -> Fields:
        """The JSON object in a file.

        Raises:
            CheckpointError: unreadable, not JSON, or not an object.
        """
        with reading(path):
            value = json.loads(read_json(path), parse_int=_integer)
        if not isinstance(value, dict):
            raise CheckpointError(f"{path} has the wrong form", got=type(value).__name__, expected="a JSON object")
        return cls(value, path)

    def integer(self, name: str, default: int | None = None) -> int:
        """A field that is an integer. default: where it is absent; None: it must be there."""
        return self._typed(name, default, "an integer", int)

    def number(self, name: str, least: float, most: float) -> float:
        """A finite number of that range."""
        value = self._typed(name, None, "a number", int, float)
        if not least <= value <= most:
            raise self.wrong(name, value, f"a number from {least} to {most}")
        return float(value)

    def flag(self, name: str) -> bool:
        """False where it is absent; null is refused, as transformers does."""
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str) -> str:
        """A field that is text, without lone surrogates. It must be there."""
        value = self._typed(name, None, "text", str)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.wrong(name, value, "text without lone surrogates") from None
        return value

    def items(self, name: str) -> list[Any]:
        """Empty where it is absent."""
        return self._typed(name, [], "a list", list, tuple)

    def fields(self, name: str) -> Fields:
        """The object in a field; empty where it is absent."""
        return Fields(self._typed(name, {}, "an object", dict, Mapping), f"{name} of {self.source}")

    def ids(self, name: str) -> list[int]:
        """A token id or a list of them, as a list; empty where it is absent."""
        value = self.values.get(name)
        ids = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
        if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
            raise self.wrong(name, value, "a token id or a list of them")
        return ids

    def wrong(self, name: str, value: object, expected: str) -> CheckpointError:
        """The error for a field that holds this value."""
        got = "null, or no such field" if value is None else shown(value)
        return CheckpointError(f"{name} in {self.source} must be {expected}", got=got)

    def _typed(self, name: str, default: Any, expected: str, *types: type) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, types) or isinstance(value, bool):
            raise self.wrong(name, value, expected)
        return value


def _integer(digits: str) -> int:
    """Python takes quadratic time for long ones, and newer versions refuse them in other words."""
    if len(digits) > 100:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)
