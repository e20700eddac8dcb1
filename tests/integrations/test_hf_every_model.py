"""Every experts module that transformers has: the operator equals its own forward, or refuses it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_models import FP32, transformers
from ttnn_moe import ContractError
from ttnn_moe.selfcheck.bounds import token_errors

T, E, K, H, I = 9, 4, 2, 32, 16
SOURCES = Path(transformers.__file__).parent / "models"


def found() -> dict[str, str]:
    """Class -> module, of all that take an experts implementation."""
    pattern = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.MULTILINE)
    return {
        name: f"transformers.models.{path.parent.name}.{path.stem}"
        for path in sorted(SOURCES.glob("*/modeling_*.py"))
        for name in pattern.findall(path.read_text(encoding="utf-8"))
    }


EVERY = found()
# refused whatever their config says
NEVER = {
    "AriaExperts": "transposed",
    "DeepseekV4Experts": "gate of its own",
    "GptOssExperts": "biases",
    "NemotronHExperts": "no gate",
}


class Config:
    """Answers whatever size a module asks of its config."""

    _experts_implementation = "eager"

    def __init__(self, activation: str):
        self.activation = activation

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        answers = {
            r"act": self.activation,
            r"num.*expert|^n_.*expert|zero_expert": E,
            r"per_tok|top_?k": K,
            r"intermediate|ffn": I,
            r"hidden|d_model": H,
            r"limit|alpha": 1.0,
            r"eps$": 1e-6,
        }
        return next((answer for pattern, answer in answers.items() if re.search(pattern, name)), None)


def make(name: str, activation: str) -> torch.nn.Module:
    source: ModuleType = importlib.import_module(EVERY[name])
    try:
        module = getattr(source, name)(Config(activation))
    except (TypeError, KeyError, ValueError) as error:
        pytest.skip(f"cannot make it without its own config: {error!r}")
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return module


@pytest.mark.parametrize("name", EVERY)
def test_equal_or_refused(name: str) -> None:
    module, run = make(name, "silu"), ALL_EXPERTS_FUNCTIONS["ttnn_moe"]
    x, ids, weights = 2 * torch.randn(T, H), torch.randint(0, E, (T, K)), torch.rand(T, K)
    with torch.no_grad():
        if name in NEVER:
            with pytest.raises(ContractError, match=NEVER[name]):
                run(module, x, ids, weights)
            return
        try:
            got = run(module, x, ids, weights)
        except ContractError as refusal:
            assert "cannot serve" in str(refusal)
            return
        assert token_errors(got, module(x, ids, weights)).max() < FP32


def test_most_are_served() -> None:
    """Of a few that are known: that the test above does not pass by refusing."""
    x, ids, weights = torch.randn(T, H), torch.randint(0, E, (T, K)), torch.rand(T, K)
    for name in ("MixtralExperts", "PhimoeExperts", "MiniMaxExperts", "Qwen3NextExperts", "JambaExperts"):
        with torch.no_grad():
            ALL_EXPERTS_FUNCTIONS["ttnn_moe"](make(name, "silu"), x, ids, weights)
        with pytest.raises(ContractError, match="its activation is another"), torch.no_grad():
            ALL_EXPERTS_FUNCTIONS["ttnn_moe"](make(name, "gelu"), x, ids, weights)
