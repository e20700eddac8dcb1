"""Gates and turns of benchmarks that need no GPU to be tested."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from benchmark_scripts import script
from paths import ROOT
from ttnn_moe import Experts, Routing

ROW = {"T": 300, "E": 128, "K": 8, "close": 0.99, "median": 0.006, "same_bits": True}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"close": 0.8}, "80.0% of the tokens"),
        ({"close": 0.86, "median": 0.03}, "the median token is off by 3.00%"),
        ({"median": float("nan")}, "the median token"),
        ({"same_bits": False}, "other bits"),
        ({"E": 8, "close": 0.997}, "not 100%"),
        ({"E": 8, "close": 1.0}, None),
    ],
)
def test_logits_of_tensor_parallelism(changed: dict, reason: str | None) -> None:
    found = script("qwen3_parallel").wrong({**ROW, **changed})
    assert found is None if reason is None else reason in found


def test_where_all_experts_are_chosen_every_token_is_near_whatever_the_order_of_sums() -> None:
    from ttnn_moe.models.qwen3 import TINY, Qwen3MoeConfig

    parallel, gpu = script("qwen3_parallel"), script("qwen3_gpu")
    E = parallel.ALL_EXPERTS
    sizes = dataclasses.replace(
        Qwen3MoeConfig.from_directory(TINY), num_hidden_layers=2, num_experts=E, num_experts_per_tok=E
    )

    class Ranks:
        @staticmethod
        def meet(word: str) -> list[str]:
            return [word, word]

    whole = gpu.make(sizes, "cpu", torch.float32, "reference", 0)
    part = gpu.make(sizes, "cpu", torch.bfloat16, "reference", 0)
    part.load_state_dict({name: value.bfloat16() for name, value in whole.state_dict().items()})
    row = parallel.near(Ranks, whole, part, 32)
    assert (row["E"], row["K"]) == (E, E) and row["close"] == 1.0 and parallel.wrong(row) is None
    with torch.no_grad():
        part.embed.weight[:, 0] += 1
    assert parallel.wrong(parallel.near(Ranks, whole, part, 32)) is not None


def test_each_round_of_the_cpu_benchmark_begins_with_another_implementation() -> None:
    layer = script("cpu_layer")
    assert [layer.in_turn(["a", "b", "c"], i) for i in (0, 1, 2, 3)] == [
        ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"],
    ]  # fmt: skip


def test_a_call_of_the_cpu_benchmark_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = script("cpu_layer")
    made: list[Routing] = []
    make = Routing.from_topk
    monkeypatch.setattr(layer.Routing, "from_topk", lambda *args: made.append(make(*args)) or made[-1])
    experts = Experts.dense(torch.randn(4, 32, 16), torch.randn(4, 16, 16))
    x, (weights, ids) = torch.randn(3, 16), torch.rand(3, 4).topk(2)
    outs = [layer.own_call(x, ids, weights, experts) for _ in range(2)]
    assert len(made) == 2 and made[0] is not made[1] and torch.equal(*outs)


@pytest.mark.parametrize("name", ["int4_24_error", "mxfp4_error", "kv_bytes", "kv_attention", "plot_kv", "tune_triton"])
def test_help_measures_nothing(name: str) -> None:
    import typer
    from typer.testing import CliRunner

    app = typer.Typer()
    app.command()(script(name).main)
    found = CliRunner().invoke(app, ["--help"])
    assert found.exit_code == 0 and "Usage" in found.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
@pytest.mark.parametrize(
    "name", ["kv_attention", "kv_bytes", "mxfp4_layer", "qwen3_engine", "qwen3_gpu", "vllm_ranks", "vllm_serve"]
)
def test_without_a_gpu_the_error_has_one_line(name: str) -> None:
    command = [sys.executable, f"benchmarks/{name}.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": "."}, check=False)
    assert done.returncode != 0 and len(done.stderr.splitlines()) == 1 and "CUDA GPU" in done.stderr


def test_without_vllm_the_error_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    need = script("need_gpu")
    monkeypatch.setattr(need, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="needs vLLM: pip install"):
        need.need_vllm()


def test_without_matplotlib_the_error_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = script("table_text")
    monkeypatch.setattr(text, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install"):
        text.need_matplotlib()
