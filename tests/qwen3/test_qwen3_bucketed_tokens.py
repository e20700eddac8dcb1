"""At 8 bits the bundled model's greedy answers are bf16's, on every task."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paths import TINY
from ttnn_moe.models.qwen3 import Engine, generate, load_model
from ttnn_moe.models.qwen3.tiny.batches import answer_ids
from ttnn_moe.models.qwen3.tiny.tasks import TASKS, examples
from ttnn_moe.models.qwen3.tokenizer import Tokenizer

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")]


def test_the_pieces_of_a_prompt_are_those_that_it_has_alone() -> None:
    """Later pieces attend to quantised earlier ones. A paged cache fills each step instead."""

    def pieces(others: list[list[int]], of_call: int | None = None, **options: Any) -> list[int]:
        model = load_model(TINY, "reference", "cpu")
        engine, found = Engine(model, 4, 1024, **options), []
        prefill = engine.runner.prefill

        def seen(prompts: Any, *rest: Any) -> Any:
            found.append(prompts.chunks)
            return prefill(prompts, *rest)

        engine.runner.prefill = seen  # type: ignore[method-assign]
        if of_call is not None:
            generate(model, [*others, [1] * 600], max_new_tokens=2, stop_ids=[], engine=engine, prefill_chunk=of_call)
        for prompt in [*others, [1] * 600] if of_call is None else []:
            engine.add(prompt, max_new_tokens=2, stop_ids=[])
        while engine.busy:
            engine.step()
        last = found[-1][-1][0]  # the row of the longest prompt
        return [n for step in found for row, n in step if row == last]

    others = [[2] * 150, [3] * 90]
    bucketed = {"kv": "bucketed", "kv_bits": 3.0}
    assert pieces(others, **bucketed) == pieces([], **bucketed) == [256, 256, 88]
    assert pieces(others) != pieces([])
    assert pieces(others, prefill_chunk=100, **bucketed) == pieces(others, 100, **bucketed) == [100] * 6


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
