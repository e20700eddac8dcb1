"""The bundled Qwen3-MoE through the Ascend backend, on CPU implementations of torch_npu's operators."""

from __future__ import annotations

import pytest
import torch

import ascend_stand_in
from paths import TINY
from ttnn_moe.errors import RequestError
from ttnn_moe.models.qwen3 import demo, generate
from ttnn_moe.models.qwen3.tokenizer import Tokenizer
from ttnn_moe.models.qwen3.weights import device_of, load_model

PROMPTS = ["Once upon a time", "The little dog", "2 + 3 ="]


@pytest.fixture(scope="module", autouse=True)
def _ascend_on_cpu():
    with ascend_stand_in.registered():
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_same_greedy_answers(dtype: torch.dtype) -> None:
    tokenizer = Tokenizer.from_directory(TINY)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    answers = {
        backend: generate(load_model(TINY, backend, "cpu", dtype), prompts, max_new_tokens=24, stop_ids=())
        for backend in ("reference", "ascend")
    }
    assert answers["ascend"].tokens == answers["reference"].tokens
    assert all(len(tokens) == 24 for tokens in answers["ascend"].tokens)


def test_the_demo_takes_the_backend(capsys) -> None:
    texts = []
    for backend in ("ascend", "reference"):
        args = ["--backend", backend, "--device", "cpu", "--prompt", PROMPTS[0], "--max-new-tokens", "8"]
        assert not demo.main(args)
        said = capsys.readouterr()
        assert f"{backend} on cpu" in said.err
        texts.append(said.out)
    assert texts[0].strip() and texts[0] == texts[1]


def test_its_tensors_go_to_an_npu() -> None:
    """No NPU is here: the error names it."""
    with pytest.raises(RequestError, match="no device npu here"):
        device_of(None, "ascend")
