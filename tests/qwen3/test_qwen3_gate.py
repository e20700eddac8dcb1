"""The gate of the model's benchmarks opens for right answers, and is shut before anything is measured otherwise."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from benchmark_scripts import script
from ttnn_moe.errors import TtnnMoeError
from ttnn_moe.models.qwen3 import TINY, Tokenizer

BITS = {"paged": None, "8": 8, "3": 3, "3 eager": 3, "2.1": 2.6}
"""Of ways; rows of the bundled context have no fewer than 2.5."""
CACHES = {"qwen3_kv": ["paged", "3", "8"], "qwen3_first_token": ["paged", "3", "3 eager", "8"]}


@pytest.mark.parametrize(
    ("weights", "ways"), [("dense", ("paged", "8", "3", "3 eager", "2.1")), ("int4_24", ("3",)), ("mxfp4", ("paged",))]
)
def test_every_format_answers(weights: str, ways: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    found = script("qwen3_gate").check("cpu", ways, weights, "reference")
    assert [row["kv"] for row in found] == list(ways) and all(row["right"] == row["asked"] == 6 for row in found)
    assert [row["bits"] for row in found] == [BITS[way] for way in ways]
    assert "'right': 6" in capsys.readouterr().out


def test_wrong_experts_shut_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = script("qwen3_gate")
    load = gate.load_model

    def damaged(*args):
        model = load(*args)
        with torch.no_grad():
            next(p for name, p in model.named_parameters() if name.endswith("down")).mul_(-1)
        return model

    monkeypatch.setattr(gate, "load_model", damaged)
    with pytest.raises(TtnnMoeError, match="the gate is shut: with dense weights and the cache 'paged' on cpu"):
        gate.check("cpu", backend="reference")


def test_a_cache_that_loses_a_token_shuts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from ttnn_moe.kv import torch_forms

    gate = script("qwen3_gate")
    right = torch_forms.dense

    def lossy(memory, rows, bound):
        k, v = right(memory, rows, bound)
        v = v.clone()
        v[..., 2::8, :] = 0
        return k, v

    monkeypatch.setattr(torch_forms, "dense", lossy)
    with pytest.raises(TtnnMoeError, match="the gate is shut"):
        gate.check("cpu", backend="reference")


def test_the_long_recall_is_long() -> None:
    gate = script("qwen3_gate")
    words = Tokenizer.from_directory(TINY).fast
    assert 800 <= len(gate.answer_ids(words, gate.asked(1)[-1])[0]) <= gate.CAPACITY - 100


@pytest.mark.parametrize("name", ["qwen3_gpu", "qwen3_engine", "qwen3_kv", "qwen3_first_token"])
def test_a_shut_gate_refuses_to_measure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    module, seen = script(name), []

    def shut(device, *args, **named):
        seen.append((device, args, named))
        raise TtnnMoeError("the gate is shut")

    monkeypatch.setattr(module, "check", shut)
    for measured in ("make", "measure_ceilings"):
        monkeypatch.setattr(module, measured, lambda *args: pytest.fail("measured behind a shut gate"))
    app = typer.Typer()
    app.command()(module.main)
    done = CliRunner().invoke(app, ["--device", "cpu"])
    assert isinstance(done.exception, TtnnMoeError) and "the gate is shut" in str(done.exception)
    assert seen[0][0] == "cpu"
    assert name not in CACHES or seen[0][1][0] == CACHES[name]


def test_turns_of_first_tokens_are_joined() -> None:
    first_token = script("qwen3_first_token")
    turns = [{"tokens": 4, "way": "3", "all_s": [1.0, 5.0], "later_all_s": [2.0, 2.0]}]
    turns.append({**turns[0], "all_s": [3.0], "later_all_s": [9.0]})
    found = first_token.joined(turns)
    assert found["all_s"] == [1.0, 5.0, 3.0] and (found["first_s"], found["later_s"]) == (3.0, 2.0)
