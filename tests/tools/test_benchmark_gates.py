"""Gates and turns of benchmarks that need no GPU to be tested."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmark_scripts import script
from paths import ROOT
from ttnn_moe import Experts, Routing
from ttnn_moe.errors import RequestError

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


def test_lists_that_a_user_gave() -> None:
    numbers = script("command_line").numbers
    assert numbers("1,32,8") == [1, 32, 8] and numbers("") == []
    for text in ("1,x", "0", "-1", "1.5", "²"):
        with pytest.raises(RequestError, match=f"got {re.escape(text.removeprefix('1,'))}; expected numbers from 1 on"):
            numbers(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--json", "none/a.json"], "none/a.json cannot be written; got no folder none"),
        (["--tokens", "1,x"], "a list cannot be read; got x"),
        (["--dtype", "bf16,fp8"], "no such dtype; got fp8; expected one or more of bf16, fp32"),
        (["--rounds", "0"], "cannot measure this; got rounds 0, threads 2"),
    ],
)
def test_a_script_ends_in_one_line_before_its_work(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpu_layer = script("cpu_layer")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cpu_layer, "layer", lambda dtype: pytest.fail("the work began"))
    monkeypatch.setattr(sys, "argv", ["benchmarks/cpu_layer.py", *options])
    with pytest.raises(SystemExit, match=f"^cpu_layer: {words}"):
        script("command_line").run_script(cpu_layer.main)


def test_an_output_of_which_a_part_was_not_written() -> None:
    cpu_layer = script("cpu_layer")
    experts = Experts.dense(torch.randn(2, 16, 8), torch.randn(2, 8, 8))
    x, ids, weights = torch.randn(9, 8), torch.zeros(9, 1, dtype=torch.int32), torch.ones(9, 1)
    right = cpu_layer.own_call(x, ids, weights, experts)
    assert cpu_layer.sampled_error(right, x, ids, weights, experts) < 1e-5
    for value in (0, cpu_layer.POISON, float("nan")):
        out = right.clone()
        out[3] = value
        assert cpu_layer.sampled_error(out, x, ids, weights, experts) == float("inf")
