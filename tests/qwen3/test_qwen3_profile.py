"""ttnn-moe profile: the share of the experts in a decode step, and what follows from it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from command import run
from qwen3_checkpoints import HAS_TINY
from ttnn_moe.errors import RequestError
from ttnn_moe.models.qwen3 import PRESETS, TINY, Engine, Qwen3Moe, load_model
from ttnn_moe.models.qwen3.profile import ROUNDS, Shares, measure
from ttnn_moe.models.qwen3.runtime.requests import Token


@pytest.mark.parametrize(
    ("experts_s", "words"),
    [(0.099, "stop: below 10%"), (0.1, "with care: 10 to 30%"), (0.3, "with care"), (0.301, "worthwhile: above 30%")],
)
def test_the_decision_of_a_share(experts_s: float, words: str) -> None:
    assert words in Shares(1.0, experts_s).decision


def test_help_names_the_models_and_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run(monkeypatch, "--help") == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if " profile " in line)
    assert run(monkeypatch, "profile", "--help") == 0
    assert "Qwen3-MoE checkpoint" in line and "decode step of a Qwen3-MoE checkpoint" in capsys.readouterr().out
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}')
    assert run(monkeypatch, "profile", "--model", str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert "got model_type 'gpt_oss'" in said and "to fix it: give a Qwen3-MoE checkpoint" in said


@pytest.mark.skipif(not HAS_TINY, reason="the bundled checkpoint is not here")
class TestBundled:
    def test_the_command(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("TTNN_MOE_BACKEND", "reference")
        monkeypatch.setenv("COLUMNS", "160")
        asked = ("profile", "--model", str(TINY), "--batch", "2", "--prompt-len", "5", "--steps", "2")
        assert run(monkeypatch, *asked) == 0
        out = capsys.readouterr().out
        assert "decode step" in out and "experts of all layers" in out and "decision" in out
        assert run(monkeypatch, *asked, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert 0 < found["experts_s"] and found["share"] == found["experts_s"] / found["step_s"] < 1
        assert found["decision"] == Shares(found["step_s"], found["experts_s"]).decision

    def test_slow_experts_are_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every call of the experts in a step is timed: made slow, they are nearly all of it."""
        model = load_model(TINY, backend="reference", device="cpu", dtype=torch.float32)
        from ttnn_moe.models.qwen3.layers import MoE

        add_experts = MoE.add_experts

        def slow(self: MoE, x: torch.Tensor, *given: object) -> torch.Tensor:
            time.sleep(0.1)
            return add_experts(self, x, *given)  # type: ignore[arg-type]

        monkeypatch.setattr(MoE, "add_experts", slow)
        assert measure(model, [[1, 2, 3]], 1).share > 0.6

    def test_every_sequence_decodes_in_every_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first ones decode while the prompts of the last ones run."""
        model, made, step = load_model(TINY, backend="reference", device="cpu"), list[int](), Engine.step

        def counted(engine: Engine) -> list[Token]:
            tokens = step(engine)
            made.append(len(tokens))
            return tokens

        monkeypatch.setattr(Engine, "step", counted)
        measure(model, [[3] * 64] * 40, 1)
        assert made[-ROUNDS - 1 :] == [40] * (ROUNDS + 1) and 0 < made[-ROUNDS - 2] <= 40
        monkeypatch.setattr("ttnn_moe.kv.paged.default_memory", lambda device: 2_000_000)
        with pytest.raises(
            RequestError, match=r"hold all sequences; got 40 sequences of \d+ tokens; expected at most 6"
        ):
            measure(model, [[3] * 64] * 40, 1)

    def test_a_sequence_that_ends_is_an_error(self) -> None:
        model = load_model(TINY, backend="reference", device="cpu")
        model.norm.weight.fill_(float("nan"))
        with pytest.raises(
            RequestError, match="a sequence ended before the last step; got 0 that decode; expected all 2"
        ):
            measure(model, [[3], [4]], 1)

    def test_prompts_that_the_context_does_not_hold_are_not_made(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """They would take 34 GB."""
        monkeypatch.setattr(torch, "randint", lambda *_, **__: pytest.fail("prompts were made"))
        assert run(monkeypatch, "profile", "--model", str(TINY), "--prompt-len", "65536", "--batch", "65536") == 2
        assert "the context is too short for these samples; got 65536 prompt tokens" in capsys.readouterr().err

    def test_refused(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(monkeypatch, "profile", "--model", str(TINY), "--prompt-len", "60000") == 2
        assert "at most 2048 together; to fix it: lower --prompt-len, --steps or --batch" in capsys.readouterr().err
        with torch.device("meta"):
            model = Qwen3Moe(PRESETS["qwen3-30b-a3b"])
        for layer in model.layers:
            layer.mlp = torch.nn.Identity()
        with pytest.raises(RequestError, match="no layer with experts"):
            measure(model, [[1]], 1)
