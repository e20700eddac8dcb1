"""Stock models of transformers with a bucketed KV cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ttnn_moe.errors import ContractError
from ttnn_moe.integrations.transformers.kv import NAME, BucketedCache
from ttnn_moe.kv.bucketed import allocation

SMALL = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 199,
}
MODELS = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
}


@pytest.fixture(autouse=True)
def _small_high_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "HIGH", ((4, 60),))


def model_of(name: str, attention: str, **changes: Any) -> Any:
    kind, config, own = MODELS[name]
    torch.manual_seed(0)
    return kind._from_config(config(**{**SMALL, **own, **changes}), attn_implementation=attention).eval()


@pytest.mark.parametrize("name", list(MODELS))
def test_a_padded_batch_generates_as_with_sdpa(name: str) -> None:
    """At 16 bits; tokens move to low tiers meanwhile. Logits of the steps agree with sdpa's on the same tokens."""
    torch.manual_seed(1)
    ids = torch.randint(1, 198, (3, 90))
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 50, 3)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    model = model_of(name, NAME)
    cache = BucketedCache(model, rows=3, capacity=128, bits=16)
    made = model.generate(ids, past_key_values=cache, output_logits=True, return_dict_in_generate=True, **options)
    got = torch.stack(made.logits, 1)
    whole = made.sequences
    longer = torch.cat((mask, torch.ones(3, whole.shape[1] - 90, dtype=mask.dtype)), 1)
    at = (longer.cumsum(1) - 1).clamp_min(0)
    want = model_of(name, "sdpa")(whole, attention_mask=longer, position_ids=at).logits[:, 89:-1]
    assert (got - want).norm() < 0.02 * want.norm()
    assert cache.get_seq_length() == 101
    cache.reset()
    again = model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(again, whole), "the cache forgot every token"


def test_few_bits_cost_little() -> None:
    torch.manual_seed(1)
    ids, model = torch.randint(1, 198, (1, 200)), model_of("qwen3", NAME)
    cache = BucketedCache(model, capacity=256, bits=4)
    got = torch.cat([model(piece, past_key_values=cache).logits for piece in ids.split(40, 1)], 1)
    want = model(ids, use_cache=False).logits
    assert 0 < (got - want).norm() / want.norm() < 0.5


def test_what_is_refused_and_why() -> None:
    model = model_of("llama", NAME)
    ids = torch.randint(1, 198, (1, 5))
    with pytest.raises(ContractError, match="reads a BucketedCache alone"):
        model.generate(ids, max_new_tokens=3, do_sample=False)
    with pytest.raises(ContractError, match="more rows than the cache.*at most 1"):
        model(ids.repeat(2, 1), past_key_values=BucketedCache(model, capacity=128, bits=8))
    narrow = model_of("mistral", NAME, sliding_window=64)
    with pytest.raises(ContractError, match="a sliding window of 64 tokens in rows of 128"):
        narrow(ids, past_key_values=BucketedCache(narrow, capacity=128, bits=8))
    wide = model_of("mistral", NAME, sliding_window=128)
    assert wide(ids, past_key_values=BucketedCache(wide, capacity=128, bits=8)).logits.isfinite().all()
    with pytest.raises(ContractError, match="no beam search"):
        model.generate(ids, num_beams=2, max_new_tokens=3, past_key_values=BucketedCache(model, 2, 128, 8))
    with pytest.raises(ContractError, match=f"got attn_implementation='sdpa'.*'{NAME}'.*set_attn_implementation"):
        BucketedCache(model_of("llama", "sdpa"), capacity=128, bits=8)
