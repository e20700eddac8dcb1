"""At 8 bits the bundled model's greedy answers are bf16's, on every task."""

from __future__ import annotations

import pytest
import torch

from paths import TINY
from ttnn_moe.models.qwen3 import Engine, generate, load_model
from ttnn_moe.models.qwen3.tiny.batches import answer_ids
from ttnn_moe.models.qwen3.tiny.tasks import TASKS, examples
from ttnn_moe.models.qwen3.tokenizer import Tokenizer

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_eight_bits_give_the_tokens_of_bf16(device: str) -> None:
    model = load_model(TINY, "reference" if device == "cpu" else "cuda", device)
    words = Tokenizer.from_directory(TINY).fast
    texts = [answer_ids(words, e)[0] for task in TASKS for e in examples(task, "heldout", 2, seed="greedy")]
    made = [
        generate(model, texts, max_new_tokens=24, engine=Engine(model, len(texts), 1152, **options)).tokens
        for options in ({}, {"kv": "bucketed", "kv_bits": 8.0})
    ]
    assert made[0] == made[1]
