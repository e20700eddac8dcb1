"""Stock models of transformers with a bucketed KV cache."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_kv_models import SMALL, apart, ids_of, model_of
from torch_defaults import defaults
from ttnn_moe.errors import ContractError, GradientsRefused
from ttnn_moe.integrations.transformers.kv import NAME, BucketedCache
from ttnn_moe.integrations.transformers.kv_model import head_norms
from ttnn_moe.kv.bucketed import allocation


@pytest.fixture(autouse=True)
def _small_high_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "HIGH", ((4, 60),))


@pytest.mark.parametrize("name", ("Qwen3", "Llama", "Mistral"))
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
    ids, model = torch.randint(1, 198, (1, 200)), model_of("Qwen3", NAME)
    cache = BucketedCache(model, capacity=256, bits=4)
    got = torch.cat([model(piece, past_key_values=cache).logits for piece in ids.split(40, 1)], 1)
    want = model(ids, use_cache=False).logits
    assert 0 < (got - want).norm() / want.norm() < 0.5


def test_a_cache_is_one_row_of_4096_tokens_at_4_bits_by_default() -> None:
    cache = BucketedCache(model_of("Qwen3", NAME))
    assert (cache.rows.rows, cache.capacity, cache.rows.allocation.bits) == (1, 4096, 4)


def test_what_is_refused_and_why() -> None:
    model = model_of("Llama", NAME)
    ids = torch.randint(1, 198, (1, 5))
    with pytest.raises(ContractError, match="reads a BucketedCache alone"):
        model.generate(ids, max_new_tokens=3, do_sample=False)
    with pytest.raises(ContractError, match="more rows than the cache.*at most 1"):
        model(ids.repeat(2, 1), past_key_values=BucketedCache(model, capacity=128, bits=8))
    narrow = model_of("Mistral", NAME, sliding_window=64)
    with pytest.raises(ContractError, match="a sliding window of 64 tokens in rows of 128"):
        narrow(ids, past_key_values=BucketedCache(narrow, capacity=128, bits=8))
    wide = model_of("Mistral", NAME, sliding_window=128)
    assert wide(ids, past_key_values=BucketedCache(wide, capacity=128, bits=8)).logits.isfinite().all()
    with pytest.raises(ContractError, match="no beam search"):
        model.generate(ids, num_beams=2, max_new_tokens=3, past_key_values=BucketedCache(model, 2, 128, 8))
    with pytest.raises(ContractError, match=f"got attn_implementation='sdpa'.*'{NAME}'.*set_attn_implementation"):
        BucketedCache(model_of("Llama", "sdpa"), capacity=128, bits=8)


def test_a_longer_pass_and_single_tokens_under_autocast() -> None:
    model, ids = model_of("Llama"), ids_of(27)
    cache = BucketedCache(model, capacity=64, bits=16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = torch.cat([model(x, past_key_values=cache).logits for x in ids.split((24, 1, 1, 1), 1)], 1)
    with torch.no_grad():
        assert apart(got, model_of("Llama", "sdpa")(ids).logits) < 0.03


@pytest.mark.parametrize("inside", ("the cache is made", "the first pass runs"))
def test_a_cache_of_inference_mode_also_serves_calls_outside_it(inside: str) -> None:
    model, ids = model_of("Qwen3"), ids_of()
    with torch.inference_mode(inside == "the cache is made"):
        cache = BucketedCache(model, capacity=64, bits=16)
    with torch.inference_mode(inside == "the first pass runs"):
        model(ids[:, :12], past_key_values=cache)
    got = model(ids[:, 12:], past_key_values=cache).logits
    assert apart(got, model_of("Qwen3", "sdpa")(ids).logits[:, 12:]) < 0.02


def test_another_default_device_changes_nothing() -> None:
    model, ids, at = model_of("Qwen3"), ids_of(25), torch.arange(25)[None]
    with torch.no_grad(), defaults(device="meta"):
        cache = BucketedCache(model, capacity=64, bits=16)
        got = [
            model(ids[:, part], position_ids=at[:, part], past_key_values=cache).logits
            for part in (slice(0, 24), slice(24, 25))
        ]
        cache.reset()
    with torch.no_grad():
        assert apart(torch.cat(got, 1), model_of("Qwen3", "sdpa")(ids).logits) < 0.02


def test_a_backward_pass_through_cached_keys_is_refused() -> None:
    model, ids = model_of("Qwen3"), ids_of()
    cache = BucketedCache(model, capacity=64, bits=16)
    for tokens in ids.split((12, 11, 1), 1):
        logits = model(tokens, past_key_values=cache).logits
        with pytest.raises(GradientsRefused, match=r'set_attn_implementation\("sdpa"\)'):
            logits.sum().backward()
    with torch.no_grad():
        assert apart(logits, model_of("Qwen3", "sdpa")(ids).logits[:, -1:]) < 0.02


def test_the_memory_of_a_cache_is_free_with_it() -> None:
    """At once: a garbage collection may come late, and GPU memory is short until then. A deep copy is a cache too."""
    model, ids = model_of("Qwen3"), ids_of(25)
    cache = BucketedCache(model, capacity=64, bits=16)
    with torch.no_grad():
        model(ids[:, :24], past_key_values=cache)
        twin, rows = copy.deepcopy(cache), weakref.ref(cache.rows)
        want = model(ids[:, 24:], past_key_values=cache).logits
        gc.disable()
        try:
            del cache
            assert rows() is None
        finally:
            gc.enable()
        assert torch.equal(model(ids[:, 24:], past_key_values=twin).logits, want)


def saved(cache: BucketedCache) -> Any:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", (copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), saved))
@torch.no_grad()
def test_a_copy_of_a_cache_goes_on_by_itself(copied: Any) -> None:
    """The step after next reads what the copy itself wrote."""
    model, ids = model_of("Qwen3"), ids_of(99)
    cache = BucketedCache(model, capacity=128, bits=8)
    model(ids[:, :60], past_key_values=cache)
    twin = copied(cache)
    got, want = ([model(ids[:, i : i + 1], past_key_values=one).logits for i in range(60, 99)] for one in (twin, cache))
    assert torch.equal(torch.cat(got), torch.cat(want))


def test_a_model_with_an_offloaded_layer(tmp_path: Path) -> None:
    """Its norms of heads are on meta between calls."""
    pytest.importorskip("accelerate")
    want = model_of("Qwen3", "sdpa")
    want.save_pretrained(tmp_path / "model")
    parts = {"model.layers.1": "disk"} | dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm"), "cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        attn_implementation=NAME,
        device_map=parts | dict.fromkeys(("model.rotary_emb", "lm_head"), "cpu"),
        offload_folder=tmp_path / "weights",
    )
    assert model.model.layers[1].self_attn.k_norm.weight.device.type == "meta"
    cache, ids = BucketedCache(model, capacity=64, bits=16), ids_of(25)
    with torch.no_grad():
        got = torch.cat([model(piece, past_key_values=cache).logits for piece in ids.split((24, 1), 1)], 1)
        assert apart(got, want(ids).logits) < 0.02


@pytest.mark.parametrize("name", ("Qwen3", "Gemma3"))
def test_the_size_of_channels_after_a_norm_is_what_the_norm_makes_it(name: str) -> None:
    """Gemma's norms scale by 1 + weight."""
    model, D = model_of(name), SMALL["head_dim"]
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.k_norm.weight)
    heads = torch.randn(100_000, D, generator=torch.Generator().manual_seed(1))
    for layer, size in zip(model.model.layers, head_norms(model, "k_norm", D), strict=True):
        with torch.no_grad():
            seen = layer.self_attn.k_norm(heads).square().mean(0)
        want = seen.unflatten(0, (2, -1)).mean(0).sqrt().repeat(2)
        torch.testing.assert_close(size, want, rtol=0.02, atol=1e-3)
