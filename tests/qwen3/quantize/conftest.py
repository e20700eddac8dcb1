"""What tests of ttnn-moe quantize share: a model, a text to calibrate with, and the model quantised."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quantize_models import made
from ttnn_moe.models.qwen3.quantize import quantize_model

TEXT = "The quick brown fox jumps over the lazy dog. 1234567890 " * 40


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTNN_MOE_BACKEND", "reference")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("random") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, converted; tests copy it before they change it."""
    out = tmp_path_factory.mktemp("plain") / "out"
    quantize_model(model, out, device="cpu")
    return out


@pytest.fixture
def out(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "out"))
