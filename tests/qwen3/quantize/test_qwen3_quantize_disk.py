"""ttnn-moe quantize on disks that are full or read-only, and in a directory that another conversion has."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from ttnn_moe.errors import RequestError
from ttnn_moe.models.qwen3.quantize import convert, quantize_model
from ttnn_moe.models.qwen3.quantize.output import CONFIG, Output, check_out

MADE_BY = {"format": "int4_24", "version": 1}


def refuses(error: int) -> OSError:
    return OSError(error, os.strerror(error))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, r"No space left on device; expected room on the disk; to fix it: make room"),
        (errno.EDQUOT, r"Disk quota exceeded; expected room on the disk; to fix it: make room"),
        (errno.EFBIG, r"File too large; to fix it: convert again"),
        (errno.EROFS, r"Read-only file system; expected a directory that this user can write to; to fix it: .*--out"),
    ],
)
@pytest.mark.parametrize("name", ["model-00002-of-00004.safetensors", CONFIG])
def test_a_file_that_the_disk_does_not_take_is_named(
    number: int, words: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is left of it."""
    output = Output(tmp_path / "out", MADE_BY)

    def full(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:3])
        raise refuses(number)

    with output.opened():
        before = sorted(output.directory.iterdir())
        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(RequestError, match=f"out/{name} cannot be written; got {words}") as error:
            output.write_bytes(name, b"content")
        assert isinstance(error.value.__cause__, OSError)
        assert sorted(output.directory.iterdir()) == before


@pytest.mark.parametrize(
    ("number", "fails"),
    [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.ENOSYS, False), (errno.EIO, True), (errno.ENOSPC, True)],
)
def test_a_file_system_that_cannot_sync_a_directory_keeps_the_file(
    number: int, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was whole by then. A disk that fails or is full is an error."""
    sync = os.fsync

    def of_files(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise refuses(number)
        sync(handle)

    monkeypatch.setattr(os, "fsync", of_files)
    output = Output(tmp_path, MADE_BY)
    with pytest.raises(RequestError, match="file cannot be written") if fails else nullcontext():
        output.write_bytes("file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"


def test_a_directory_that_does_not_take_its_first_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise refuses(errno.EROFS)

    (tmp_path / ".model-00001.0123456789abcdef.part").write_bytes(b"left by a killed writer")
    monkeypatch.setattr(Path, "unlink", read_only)
    with (
        pytest.raises(RequestError, match=rf"{tmp_path} cannot be written; got Read-only file system; .*--out"),
        Output(tmp_path, MADE_BY).opened(),
    ):
        pass


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(("flags", "reason"), [(os.ST_RDONLY, "Read-only file system"), (0, "Permission denied")])
def test_why_a_directory_cannot_be_written(
    flags: int, reason: str, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path if exists else tmp_path / "new" / "out"
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flags))
    what = "written" if exists else "made"
    with pytest.raises(RequestError, match=rf"directory {out} cannot be {what}; got {tmp_path}: {reason}; .*--out"):
        check_out(out, tmp_path / "model")


@pytest.mark.parametrize("shards", [0, 1])
@pytest.mark.parametrize("exists", [True, False])
def test_a_directory_that_was_made_for_nothing_is_removed(exists: bool, shards: int, tmp_path: Path) -> None:
    """One that was there stays, and one that holds shards."""
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    output = Output(out, MADE_BY)
    with pytest.raises(KeyboardInterrupt), output.opened():
        for i in range(shards):
            output.write_bytes(f"model-{i}.safetensors", b"content")
        raise KeyboardInterrupt
    assert out.exists() == (exists or shards > 0)
    if out.exists():
        assert len(list(out.iterdir())) == shards


def test_two_conversions_of_one_process_do_not_write_to_one_directory(tmp_path: Path) -> None:
    with (
        Output(tmp_path / "out", MADE_BY).opened(),
        pytest.raises(RequestError, match="being written; got another conversion, .*this process .*; expected .*--out"),
        Output(tmp_path / "out", MADE_BY).opened(),
    ):
        pass
    with Output(tmp_path / "out", MADE_BY).opened():
        pass


def test_two_conversions_do_not_write_to_one_directory(model: Path, out: Path) -> None:
    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(RequestError, match="is being written; got another conversion, in .*or in another"):
            quantize_model(model, out, device="cpu")
    finally:
        os.close(handle)


def test_a_full_disk_is_refused_before_any_shard(model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 1000))
    with pytest.raises(
        RequestError, match=r"too full; got 1000 bytes free; expected \d+.\d+ [KM]iB; to fix it: make room for "
    ):
        quantize_model(model, tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_a_run_that_goes_on_needs_room_for_what_is_missing_alone(model: Path, out: Path, monkeypatch) -> None:
    (out / "model-00003-of-00004.safetensors").unlink()
    held = sum(path.stat().st_size for path in out.iterdir())
    needed = convert.Conversion(model, out, device="cpu").disk - held
    free = [needed - 2048, needed]
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, free.pop(0)))
    with pytest.raises(RequestError, match=r"too full; .*; to fix it: make room for 2\.00 KiB more, or"):
        quantize_model(model, out, device="cpu")
    report = quantize_model(model, out, device="cpu")
    assert (report.shards, report.kept) == (4, 3)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("/proc/x", "the directory /proc/x cannot be made; got No such file .*another --out"),
        ("/dev/null/x", "x cannot be written; got /dev/null, a file; expected another directory"),
        ("/tmp/" + "a" * 300, "cannot be made; got File name too long; .*another --out"),
    ],
)
def test_a_directory_that_cannot_be_made_is_named(out: str, words: str, model: Path) -> None:
    with pytest.raises(RequestError, match=words):
        quantize_model(model, out, device="cpu")


def test_a_directory_of_another_user_is_refused_before_the_model_is_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path or mode != os.W_OK | os.X_OK)
    monkeypatch.setattr(convert, "Checkpoint", None)
    with pytest.raises(RequestError, match=r"cannot be made; got \S+: Permission denied; .*another --out"):
        quantize_model(model, tmp_path / "a" / "b", device="cpu")
