"""The attention "ttnn_moe_kv" of models with windows, chunks, sinks, packed sequences: right, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kv_models import apart, ids_of, model_of
from ttnn_moe.errors import ContractError
from ttnn_moe.integrations.transformers.kv import BucketedCache

BOTH: tuple[dict[str, Any], ...] = ({}, {"attention": "sdpa"})
FULL = {"layer_types": ["full_attention"] * 2}


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("use_cache", (False, True), ids=("no cache", "first pass of a DynamicCache"))
@pytest.mark.parametrize("name, changes", (("Mistral", {"sliding_window": 8}), ("Gemma3", {}), ("Llama4", {})))
def test_windows_and_chunks_without_a_cache(name: str, changes: dict[str, Any], use_cache: bool) -> None:
    got, want = (model_of(name, **changes, **attention)(ids_of(), use_cache=use_cache).logits for attention in BOTH)
    assert apart(got, want) < 1e-5


def test_packed_sequences_without_a_cache() -> None:
    at = torch.arange(12).repeat(2)[None]
    got, want = (
        model_of("Qwen3", **attention)(ids_of(), position_ids=at, use_cache=False).logits for attention in BOTH
    )
    assert apart(got, want) < 1e-5


def test_packed_sequences_with_a_cache_are_refused() -> None:
    model = model_of("Qwen3")
    cache = BucketedCache(model, capacity=64, bits=16)
    with pytest.raises(ContractError, match="whole sequences.*position_ids that are no plain run.*attention_mask"):
        model(ids_of(), position_ids=torch.arange(12).repeat(2)[None], past_key_values=cache)
    with pytest.raises(ContractError, match=r"packed sequences \(cu_seq_lens_q\)"):
        model(ids_of(), cu_seq_lens_q=torch.tensor([0, 12, 24]), past_key_values=cache)


def test_a_mask_of_four_dimensions() -> None:
    """Without a cache it is obeyed; a BucketedCache holds no such mask."""
    model, mask = model_of("Qwen3"), torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
    mask[..., 5:, 2:4] = False
    want = model_of("Qwen3", "sdpa")(ids_of(), attention_mask=mask, use_cache=False).logits
    assert apart(model(ids_of(), attention_mask=mask, use_cache=False).logits, want) < 1e-5
    with pytest.raises(ContractError, match="a mask of 4 dimensions.*expected each token attends to all.*sdpa"):
        model(ids_of(), attention_mask=mask, past_key_values=BucketedCache(model, capacity=64, bits=16))


@pytest.mark.parametrize("cached", (False, True))
@pytest.mark.parametrize("name, odd, sizes", (("GptOss", "s_aux", FULL), ("Gemma2", "softcap", FULL)))
def test_sinks_and_soft_caps_are_refused(name: str, odd: str, sizes: dict[str, Any], cached: bool) -> None:
    model = model_of(name, **sizes)
    cache = BucketedCache(model, capacity=64, bits=16) if cached else None
    with pytest.raises(ContractError, match=f'plain causal attention; got {odd};.*"sdpa".*, or "eager" for a model'):
        model(ids_of(), past_key_values=cache, use_cache=cached)
    model.set_attn_implementation("eager")  # transformers refuses sdpa for these models
    model(ids_of(), use_cache=False)


@pytest.mark.parametrize("name, window", (("Gemma3", 8), ("Llama4", 8)))
def test_a_cache_longer_than_a_window_or_chunk_is_refused_when_it_is_made(name: str, window: int) -> None:
    with pytest.raises(ContractError, match=f"a sliding window of {window} tokens in rows of 64"):
        BucketedCache(model_of(name), capacity=64, bits=16)


@pytest.mark.parametrize(
    "name, changes",
    (("Mistral", {"sliding_window": 64}), ("Llama4", {"attention_chunk_size": 64}), ("Gemma3", {"sliding_window": 64})),
)
def test_windows_and_chunks_as_long_as_a_row_are_served(name: str, changes: dict[str, Any]) -> None:
    """Gemma's scaling is not head_dim**-0.5."""
    model, ids = model_of(name, **changes), ids_of(64)
    cache = BucketedCache(model, capacity=64, bits=16)
    got = torch.cat([model(x, past_key_values=cache).logits for x in ids.split((40, 23, 1), 1)], 1)
    assert apart(got, model_of(name, "sdpa", **changes)(ids, use_cache=False).logits) < 0.02


@pytest.mark.parametrize("cached", (False, True))
def test_a_window_of_the_attention_alone_is_refused(cached: bool) -> None:
    """The config does not say it, so no mask holds it."""
    model = model_of("Qwen3")
    cache = BucketedCache(model, capacity=64, bits=16) if cached else None
    model.model.layers[0].self_attn.sliding_window = 8
    with pytest.raises(ContractError, match="a sliding window of 8 "):
        model(ids_of(), past_key_values=cache, use_cache=cached)


def test_attention_that_is_not_causal_is_refused() -> None:
    model = model_of("Qwen3")
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(ContractError, match="computes plain causal attention; got attention that is not causal"):
        model(ids_of(), past_key_values=BucketedCache(model, capacity=64, bits=16))


def test_dropout() -> None:
    """Without a cache it is sdpa's; a BucketedCache refuses it."""
    got, want = (model_of("Llama", attention_dropout=0.5, **attention).train() for attention in BOTH)
    logits = []
    for model in (got, want):
        torch.manual_seed(5)
        logits.append(model(ids_of(), use_cache=False).logits)
    assert torch.equal(*logits)
    with pytest.raises(ContractError, match=r"dropout of 0.5.*model.eval\(\)"):
        got(ids_of(), past_key_values=BucketedCache(got, capacity=64, bits=16))
