"""The command `generate` of several ranks."""

from __future__ import annotations

import pytest

from processes import run_python
from shared_models import TASKS
from ttnn_moe.models.qwen3 import demo


@pytest.mark.slow(12)
def test_the_command_under_torchrun() -> None:
    """Panels of all prompts, in order, as one process shows them."""
    asked = [word for text in TASKS[:3] for word in ("--prompt", text)]
    one = ["-m", "ttnn_moe", "generate", *asked, "--max-new-tokens", "8", "--device", "cpu", "--backend", "reference"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    outs = [run_python(*one), run_python(*torchrun, *one, "--parallel", "experts", OMP_NUM_THREADS="1")]
    want, shared = ([line for line in out.stdout.splitlines() if line.startswith("│ ")][:3] for out in outs)
    assert shared == want and len(want) == 3 and "AB12" in want[0]
    new = [next(line for line in out.stderr.splitlines() if "new tokens" in line) for out in outs]
    assert new[0].split("new tokens")[1].split() == new[1].split("new tokens")[1].split()  # of all ranks


@pytest.mark.parametrize(
    "options, words",
    [
        (["--parallel", "experts"], "torchrun --nproc-per-node"),
        (["--parallel", "layers"], "ranks cannot share that"),
        (["--parallel", "experts", "--exchange", "pigeon"], "unknown exchange"),
        (["--exchange", "hierarchical"], "--exchange is of --parallel experts"),
        (["--parallel", "tensor", "--exchange", "hierarchical"], "--exchange is of --parallel experts"),
        (["--parallel", "experts", "--device", "cuda:1"], "by LOCAL_RANK"),
        (["--parallel", "tensor", "--mesh", "1x8"], "--mesh is of backend tenstorrent"),
    ],
)
def test_what_the_command_refuses(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert demo.main(["--device", "cpu", *options]) == 2
    assert words in capsys.readouterr().err


def test_torchrun_without_parallel_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert demo.main(["--device", "cpu"]) == 2
    assert "add --parallel experts" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "")
    demo._check_alone("auto")
