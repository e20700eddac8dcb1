"""A model on a GPU that is not the current one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.qwen3 import TINY, TINY_INT4_24, Engine, Tokenizer, generate, load_model

PROMPTS = ("Add: 34+8", "Copy: zz9 q", "Reverse: abc")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("checkpoint", [TINY, TINY_INT4_24], ids=lambda path: path.name)
@pytest.mark.parametrize("kv", ["paged", "bucketed"])
@pytest.mark.parametrize("graphs", [False, True])
def test_tokens_of_a_gpu_that_is_not_the_current_one(checkpoint: Path, kv: str, graphs: bool) -> None:
    tokenizer = Tokenizer.from_directory(checkpoint)
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    made = []
    for device in ("cuda:0", "cuda:1"):
        model = load_model(checkpoint, device=device)
        engine = Engine(model, rows=2, capacity=512, graphs=graphs, kv=kv)
        engine.capture()
        made.append(generate(model, ids, engine=engine, max_new_tokens=24).tokens)
        assert torch.cuda.current_device() == 0
    assert made[0] == made[1]
