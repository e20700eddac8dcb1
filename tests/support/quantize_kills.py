"""Conversions that are killed at random: `python quantize_kills.py MODEL FOLDER TEXT KILLS`.

Each conversion runs in a fork that gets SIGKILL at its n-th operation on a file of --out, or at some time. Then the
directory must refuse to load, or be complete; a second run must finish it, byte for byte as an uninterrupted one.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from ttnn_moe.errors import CheckpointError
from ttnn_moe.models.qwen3 import load_model
from ttnn_moe.models.qwen3.quantize import quantize_model

OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir")


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def converted(model: Path, out: Path, text: Path | None, n: int = 1 << 30, seconds: float | None = None) -> int | None:
    """Operations on files of `out` that a conversion has; None: it was killed.

    n: kill before the n-th operation, counted from 0. seconds: kill after so long.
    """
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event: str, arguments: tuple) -> None:
            nonlocal seen
            if event in OPERATIONS and str(out) in str(arguments[0]):
                if seen == n:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        sys.addaudithook(hook)
        quantize_model(model, out, calibrate=text, device="cpu")
        os._exit(seen)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def loads(out: Path) -> bool:
    try:
        load_model(out, "reference", "cpu")
    except CheckpointError as error:
        assert str(out) in str(error)
        return False
    return True


def main(model: Path, folder: Path, text: Path, kills: int) -> None:
    torch.set_num_threads(1)
    whole, out = folder / "whole", folder / "killed"
    for calibrate in (None, text):
        shutil.rmtree(whole, ignore_errors=True)
        start = time.monotonic()
        points = converted(model, whole, calibrate) or 0
        want, kept, took, rng = files(whole), 0, time.monotonic() - start, random.Random(0)
        for n in sorted(rng.sample(range(points), min(kills, points))):
            if n % 3:
                assert converted(model, out, calibrate, n) is None
            else:
                converted(model, out, calibrate, seconds=took * rng.random())
            assert loads(out) == (out / "config.json").exists(), n
            if loads(out):
                assert {name: there for name, there in files(out).items() if name in want} == want, n
            if n % 2:  # the run after the kill is killed too
                converted(model, out, calibrate, n // 2)
            kept += quantize_model(model, out, calibrate=calibrate, device="cpu").kept
            assert files(out) == want, n
            shutil.rmtree(out)
        print(f"{points} operations, {kept} shards kept")
        assert points > 20 and kept


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), int(sys.argv[4]))
