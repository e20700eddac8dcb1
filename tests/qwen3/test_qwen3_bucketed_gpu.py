"""The bucketed cache under the engine on a GPU: captured steps of prompts and of decode, moves between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paths import TINY
from qwen3_checkpoints import prompts
from ttnn_moe.models.qwen3 import Engine, generate, load_model
from ttnn_moe.models.qwen3.runtime.prefill_graphs import PrefillGraphs
from ttnn_moe.models.qwen3.tiny.batches import answer_ids
from ttnn_moe.models.qwen3.tiny.tasks import TASKS, examples
from ttnn_moe.models.qwen3.tokenizer import Tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")]


@pytest.mark.parametrize("bits", [3, 8, 16])
def test_captured_steps_give_the_tokens_of_eager_ones(bits: float) -> None:
    model, texts = load_model(TINY, backend="cuda"), prompts([300, 40, 150, 7], 500)
    made = []
    for graphs in (None, False):
        engine = Engine(model, 4, 1024, graphs=graphs, kv="bucketed", kv_bits=bits)
        made.append(generate(model, texts, max_new_tokens=120, stop_ids=(), engine=engine).tokens)
        assert engine.load().free_pages == engine.cache.total
    assert made[0] == made[1]


@pytest.mark.parametrize("bits", [3.0, 8.0])
def test_captured_prompts_give_the_answers_of_eager_ones(bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of tasks, some in one step with rows that decode; and the same tokens every time."""
    model, words = load_model(TINY, backend="cuda"), Tokenizer.from_directory(TINY).fast
    texts = [answer_ids(words, e)[0] for task in TASKS for e in examples(task, "heldout", 3, seed="captured")]
    run, captured = PrefillGraphs.run, list[tuple[bool, bool]]()

    def spy(self: PrefillGraphs, ids: torch.Tensor, *where: Any) -> torch.Tensor | None:
        logits = run(self, ids, *where)
        captured.append((logits is not None, bool(where[2])))
        return logits

    monkeypatch.setattr(PrefillGraphs, "run", spy)
    made = []
    for graphs in (False, None, None):
        engine = Engine(model, 4, 1152, graphs=graphs, kv="bucketed", kv_bits=bits)
        if graphs is None:
            engine.capture()
        made.append(generate(model, texts, max_new_tokens=24, engine=engine).tokens)
        assert engine.load().free_pages == engine.cache.total
    assert {(True, False), (True, True)} <= set(captured)
    assert made[1] == made[2]
    alike = sum(a == b for a, b in zip(made[0], made[1], strict=True)) / len(texts)
    assert alike == 1 if bits == 8 else alike > 0.7, alike
