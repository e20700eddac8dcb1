"""What a BucketedCache refuses to be made for, and which calls of transformers it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kv_models import apart, ids_of, model_of
from ttnn_moe.errors import ContractError
from ttnn_moe.integrations.transformers.kv import BucketedCache

ROWS = r"does not move rows; got {}.*expected the same rows.*reset\(\)"


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    "options", ({"prompt_lookup_num_tokens": 3}, {"assistant_model": "sdpa"}), ids=("prompt lookup", "assistant")
)
def test_generation_that_takes_tokens_back(options: dict[str, Any]) -> None:
    model = model_of("Qwen3")
    if "assistant_model" in options:
        options = {"assistant_model": model_of("Qwen3", options["assistant_model"])}
    cache = BucketedCache(model, capacity=64, bits=16)
    with pytest.raises(ContractError, match=r"takes no token back; got crop\(\).*without assistant_model"):
        model.generate(ids_of(), past_key_values=cache, max_new_tokens=8, do_sample=False, **options)


def test_guidance_has_a_cache_of_its_own() -> None:
    model = model_of("Qwen3")
    cache = BucketedCache(model, capacity=64, bits=16)
    with pytest.raises(ContractError, match="reads a BucketedCache alone; got another cache.*without guidance_scale"):
        model.generate(ids_of(), past_key_values=cache, max_new_tokens=8, do_sample=False, guidance_scale=1.5)


@pytest.mark.parametrize(
    "call, argument, message",
    (
        ("crop", 4, "takes no token back"),
        ("batch_repeat_interleave", 2, ROWS.format("batch_repeat_interleave")),
        ("batch_select_indices", torch.tensor([0]), ROWS.format("batch_select_indices")),
    ),
)
def test_calls_that_change_cached_tokens(call: str, argument: Any, message: str) -> None:
    model = model_of("Qwen3")
    cache = BucketedCache(model, capacity=64, bits=16)
    model(ids_of(), past_key_values=cache)
    with pytest.raises(ContractError, match=message):
        getattr(cache, call)(argument)


@pytest.mark.parametrize(
    "sizes, message",
    (
        ({"num_hidden_layers": 1}, "got layer 1; expected 1 layers"),
        ({"num_key_value_heads": 4}, "keys with 2 key/value heads of 32.*expected 4 key/value heads of 32"),
        ({"head_dim": 64}, "keys with 2 key/value heads of 32.*expected 2 key/value heads of 64"),
        ({"num_attention_heads": 8}, "got 4 heads of queries; expected 8 heads"),
    ),
)
def test_a_cache_of_a_model_of_other_sizes(sizes: dict[str, int], message: str) -> None:
    cache = BucketedCache(model_of("Qwen3", **sizes), capacity=64, bits=16)
    with pytest.raises(ContractError, match=message):
        model_of("Qwen3")(ids_of(), past_key_values=cache)


def test_a_cache_of_more_layers_is_refused_at_the_second_pass() -> None:
    model, cache = model_of("Qwen3"), BucketedCache(model_of("Qwen3", num_hidden_layers=3), capacity=64, bits=16)
    model(ids_of(), past_key_values=cache)
    with pytest.raises(ContractError, match="after 2 of 3 layers.*made for another model"):
        model(ids_of(1), past_key_values=cache)


@pytest.mark.parametrize("name", ("Qwen3Next", "FalconH1"))
def test_hybrid_models_are_refused_when_the_cache_is_made(name: str) -> None:
    with pytest.raises(ContractError, match="layers are all plain attention; got layer 0: LinearAttention.*sdpa"):
        BucketedCache(model_of(name), capacity=64, bits=16)


@pytest.mark.parametrize("model", (None, torch.nn.Linear(2, 2)))
def test_no_model(model: Any) -> None:
    with pytest.raises(ContractError, match=r"got (NoneType|Linear); expected a PreTrainedModel.*BucketedCache\(model"):
        BucketedCache(model)


@pytest.mark.parametrize("name", ("Qwen3", "Llama"))
def test_a_model_whose_first_weights_are_offloaded(name: str) -> None:
    accelerate, model = pytest.importorskip("accelerate"), model_of(name)
    cache = BucketedCache(model, capacity=64, bits=16)
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(ContractError, match="on which device it runs; got .*meta.*accelerate.*before accelerate"):
        BucketedCache(model, capacity=64, bits=16)
    want = model_of(name, "sdpa")(ids_of()).logits
    assert apart(model(ids_of(), past_key_values=cache).logits, want) < 0.02
