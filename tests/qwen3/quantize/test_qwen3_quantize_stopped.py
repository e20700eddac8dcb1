"""ttnn-moe quantize: what a run leaves that was killed or that failed, and how the next run finishes it."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paths import ROOT
from processes import run_python
from quantize_models import files
from ttnn_moe.errors import CheckpointError, RequestError
from ttnn_moe.models.qwen3 import load_model
from ttnn_moe.models.qwen3.quantize import convert, quantize_model
from ttnn_moe.models.qwen3.weight_formats import UNFINISHED


@pytest.mark.slow(20)
def test_a_killed_conversion_is_finished_by_the_next(model: Path, text: Path, tmp_path: Path) -> None:
    script = ROOT / "tests" / "support" / "quantize_kills.py"
    kills = os.environ.get("TTNN_MOE_FUZZ", "5")
    done = run_python(script, model, tmp_path, text, kills, OMP_NUM_THREADS="1", TTNN_MOE_BACKEND="reference")
    assert done.stdout.count("shards kept") == 2


@pytest.mark.parametrize("harm", ["truncated", "flipped bit", "header", "empty", "absent"])
def test_damaged_shards_are_made_again(harm: str, model: Path, plain: Path, out: Path) -> None:
    name = "model-00003-of-00004.safetensors"
    content = bytearray((out / name).read_bytes())
    if harm == "flipped bit":
        content[-5] ^= 4
    elif harm == "header":
        content[20] ^= 255
    else:
        content = content[: {"truncated": -1, "empty": 0}.get(harm)]
    (out / name).write_bytes(content)
    if harm == "absent":
        (out / name).unlink()
    with pytest.raises(CheckpointError, match=r"model-00003.*checksum" if harm == "flipped bit" else "model-00003"):
        load_model(out)
    (out / ".model-00001.0123456789abcdef.part").write_bytes(b"left by a killed writer")
    steps: list[tuple[int, int]] = []
    assert quantize_model(model, out, device="cpu", progress=lambda *step: steps.append(step)).kept == 3
    assert steps == [(n, 10) for n in (4, 5, 6, 7, 8, 9, 10)]
    assert files(out) == files(plain)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_each_shards_checksum_is_read(n: int, out: Path) -> None:
    path = out / f"model-0000{n}-of-00004.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"model-0000{n}.*checksum"):
        load_model(out)


def test_a_disk_that_fills_meanwhile_is_named_and_the_next_run_finishes(
    model: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, fsync = tmp_path / "out", os.fsync

    def full(handle: int) -> None:
        if "model-00003" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # names no file, as one of a write
        fsync(handle)

    with (
        monkeypatch.context() as patch,
        pytest.raises(RequestError, match=r"out/model-00003-\S+ cannot be written; got No space left .* make room"),
    ):
        patch.setattr(os, "fsync", full)
        quantize_model(model, out, device="cpu")
    assert quantize_model(model, out, device="cpu").kept == 2
    assert files(out) == files(plain)


def test_each_file_is_on_the_disk_before_it_has_its_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut leaves a file of zeros with the name of a whole one."""
    out, seen, fsync, replace = tmp_path / "out", [], os.fsync, Path.replace

    def synced(handle: int) -> None:
        seen.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def renamed(part: Path, target: Path) -> Path:
        assert seen[-1] == part
        seen.append(target)
        return replace(part, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    before = os.listdir("/proc/self/fd")
    quantize_model(model, out, device="cpu")
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert seen[2::3] == [out] * (len(seen) // 3)  # a file, its name, the directory
    assert {path.name for path in seen[1::3]} == {*files(out), UNFINISHED}
    assert seen[-2].name == "config.json", "with it a directory is a checkpoint"


def test_an_interrupt_does_not_wait_for_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a model are gigabytes."""

    class Slow:
        pieces = 0

        def update(self, piece: bytes) -> None:
            self.pieces += 1
            time.sleep(0.2)
            if self.pieces == 3:  # by now the main thread waits
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(convert.hashlib, "sha256", Slow)
    (tmp_path / "config.json").write_text("{}")
    large = tmp_path / "model.safetensors"
    with large.open("wb") as file:
        file.truncate(40 << 24)
    start = time.monotonic()
    # a shell starts what it puts into the background without SIGINT
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            convert.fingerprint(SimpleNamespace(directory=tmp_path, headers={"w": {"file": large}}))
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 4
