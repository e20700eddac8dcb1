"""The bucketed cache under the engine on a GPU: captured decode steps, moves between them."""

from __future__ import annotations

import pytest
import torch

from paths import TINY
from qwen3_checkpoints import prompts
from ttnn_moe.models.qwen3 import Engine, generate, load_model

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
