"""What a BucketedCache holds after passes that are refused, that break off, or whose keys change on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kv_models import apart, ids_of, model_of
from ttnn_moe.errors import ContractError, RequestError
from ttnn_moe.integrations.transformers.kv import BucketedCache


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def test_a_refused_pass_leaves_the_cache_as_it_was() -> None:
    model, ids = model_of("Qwen3"), ids_of(64)
    cache = BucketedCache(model, capacity=64, bits=16)
    model(ids[:, :60], past_key_values=cache)
    for attempt in (
        {"input_ids": ids[:, :10]},
        {"input_ids": ids[:, :2], "attention_mask": torch.zeros(1, 62)},
        {"input_ids": ids[:, :2], "attention_mask": torch.ones(1, 1, 2, 62)},
        {"input_ids": ids[:, :2].repeat(2, 1)},
    ):
        with pytest.raises((RequestError, ContractError)):
            model(past_key_values=cache, **attempt)
        assert cache.get_seq_length() == 60
    got = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(60, 64)]
    with pytest.raises(RequestError, match="does not fit"):
        model(ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 64
    assert apart(torch.cat(got, 1), model_of("Qwen3", "sdpa")(ids).logits[:, 60:]) < 0.02


@pytest.mark.parametrize("layers", (1, 2))
def test_keys_that_change_after_update_are_refused(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two layers at the first pass; of one layer, whose first pass is right, at the second."""
    model = model_of("Llama", num_hidden_layers=layers)
    cache = BucketedCache(model, capacity=64, bits=16)
    update = BucketedCache.update
    monkeypatch.setattr(BucketedCache, "update", lambda *args, **kwargs: [x * 1 for x in update(*args, **kwargs)])
    if layers == 1:
        want = model_of("Llama", "sdpa", num_hidden_layers=1)(ids_of()).logits
        assert apart(model(ids_of(), past_key_values=cache).logits, want) < 0.02
    for _ in range(2):
        with pytest.raises(ContractError, match="keys of a BucketedCache did not reach the attention.*layer 0.*sdpa"):
            model(ids_of(1), past_key_values=cache)


@pytest.mark.parametrize("name", ("DeepseekV3", "JetMoe", "DiffLlama"))
def test_models_that_change_their_keys_are_refused_at_the_first_pass(name: str) -> None:
    try:
        model = model_of(name)
    except KeyError:
        pytest.skip("this transformers does not give the model a registered attention")
    with pytest.raises(ContractError, match="expected.*to fix it.*sdpa"):
        model(ids_of(), past_key_values=BucketedCache(model, capacity=64, bits=16))


def test_a_pass_that_breaks_off_is_seen_until_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of("Llama"), ids_of()
    cache = BucketedCache(model, capacity=64, bits=16)
    layer = model.model.layers[1]

    def broken(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(layer.self_attn, "forward", broken)
        model(ids, past_key_values=cache)
    for _ in range(2):
        with pytest.raises(ContractError, match=r"do not hold the same tokens.*layer 0 after 1 of 2.*cache.reset\(\)"):
            model(ids, past_key_values=cache)
    cache.reset()
    assert apart(model(ids, past_key_values=cache).logits, model_of("Llama", "sdpa")(ids).logits) < 0.02


@pytest.mark.parametrize("where", ("prefill", "write", "attend"))
@pytest.mark.parametrize("kind", (KeyboardInterrupt, MemoryError))
def test_a_pass_that_breaks_off_in_the_first_layer_is_seen(
    kind: type[BaseException], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = model_of("Llama"), ids_of()
    cache = BucketedCache(model, capacity=64, bits=16)
    model(ids[:, :9], past_key_values=cache)

    def broken(*args: Any) -> None:
        raise kind

    with monkeypatch.context() as patch, pytest.raises(kind):
        patch.setattr(cache.rows, where, broken)
        model(ids[:, 9:], past_key_values=cache)
    for _ in range(2):
        with pytest.raises(ContractError, match=r"do not hold the same tokens.*layer 0 after 0 of 2.*cache.reset\(\)"):
            model(ids[:, 9:], past_key_values=cache)
    cache.reset()
    assert apart(model(ids, past_key_values=cache).logits, model_of("Llama", "sdpa")(ids).logits) < 0.02


def test_a_batch_keeps_its_rows_and_its_mask() -> None:
    model, ids = model_of("Qwen3"), ids_of(24, 2)
    cache = BucketedCache(model, rows=3, capacity=64, bits=16)
    model(ids, past_key_values=cache)
    with pytest.raises(ContractError, match="does not move rows; got a batch of 3 rows after passes of 2"):
        model(ids[:1, :1].repeat(3, 1), past_key_values=cache)
    hidden = torch.ones(2, 25)
    hidden[1, :4] = 0
    with pytest.raises(ContractError, match=r"attention_mask does not fit.*expected.*\[24, 24\] cached tokens"):
        model(ids[:, :1], attention_mask=hidden, past_key_values=cache)


def test_a_row_may_begin_after_the_others() -> None:
    """Its first token comes alone, while the others decode."""
    model, ids, mask = model_of("Qwen3"), ids_of(24, 2), torch.ones(2, 24)
    mask[0, :20] = 0
    cache, at = BucketedCache(model, rows=2, capacity=64, bits=16), (mask.cumsum(1) - 1).clamp_min(0).long()
    got = [
        model(
            ids[:, part], attention_mask=mask[:, : part.stop], position_ids=at[:, part], past_key_values=cache
        ).logits[:, -1]
        for part in (slice(0, 20), *(slice(i, i + 1) for i in range(20, 24)))
    ]
    want = model_of("Qwen3", "sdpa")(ids, attention_mask=mask, position_ids=at).logits[:, 20:]
    assert apart(torch.stack(got[1:], 1), want) < 0.02


@pytest.mark.parametrize("dropped", (False, True))
def test_a_mask_that_shows_padding_is_refused(dropped: bool) -> None:
    """The cache holds no padding, so a later pass cannot attend to it, as it does with sdpa."""
    model, ids, mask = model_of("Qwen3"), ids_of(24, 2), torch.ones(2, 24)
    mask[0, :5] = 0
    cache = BucketedCache(model, rows=2, capacity=64, bits=16)
    model(ids, attention_mask=mask, past_key_values=cache)
    shown = None if dropped else torch.ones(2, 25)
    with pytest.raises(ContractError, match=r"attention_mask does not fit.*\[24, 24\].*expected.*\[19, 24\] cached"):
        model(ids[:, :1], attention_mask=shown, past_key_values=cache)
    model(ids[:, :1], attention_mask=torch.cat([mask, torch.ones(2, 1)], 1), past_key_values=cache)


def test_a_mask_that_hides_other_tokens_than_before_is_refused() -> None:
    """As many of them as before: the cache holds a token that the mask hides now."""
    model, ids = model_of("Qwen3"), ids_of()
    cache, before, after = BucketedCache(model, capacity=64, bits=16), torch.ones(1, 20), torch.ones(1, 24)
    before[0, 0] = after[0, 5] = 0
    model(ids[:, :20], attention_mask=before, past_key_values=cache)
    with pytest.raises(ContractError, match=r"attention_mask does not fit.*\[19\] cached tokens, others than before"):
        model(ids[:, 20:], attention_mask=after, past_key_values=cache)
    model(ids[:, 20:], attention_mask=torch.cat([before, torch.ones(1, 4)], 1), past_key_values=cache)


def test_a_compiled_model_does_not_compile_each_pass_anew() -> None:
    model, ids = model_of("Qwen3"), ids_of(40)
    cache, compiled = BucketedCache(model, capacity=64, bits=16), torch.compile(model, backend="eager")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        got = [compiled(piece, past_key_values=cache).logits for piece in ids.split((24, *[1] * 16), 1)]
    torch._dynamo.reset()
    assert apart(torch.cat(got, 1), model_of("Qwen3", "sdpa")(ids).logits) < 0.02
