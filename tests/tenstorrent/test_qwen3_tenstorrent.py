"""Qwen3 with every tensor on (emulated) Tenstorrent chips: every kind of model, pieces of prompts, requests.

The bundled checkpoint's answers, on devices and simulators too: tenstorrent_model_runs.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qwen3_checkpoints import TINY, make, prompts
from tenstorrent_model_runs import encode, least_correlation
from ttnn_moe.models.qwen3 import Engine, generate, load_model, tt
from ttnn_moe.models.qwen3.runtime.generate import engine_for
from ttnn_moe.models.qwen3.tt import model as models
from ttnn_moe.models.qwen3.tt.cache import PagedCache
from ttnn_moe.models.qwen3.tt.sizes import model_sizes
from ttnn_moe.tenstorrent.plans import plan_model

# whole tiles; a large router, so that rounding swaps experts that matter little
SIZES = {"moe_intermediate_size": 64, "router_scale": 8.0}
KINDS = {
    "untied": (1, {}),
    "tied": (1, {"tie_word_embeddings": True}),
    "a head that 4 chips cannot share evenly": (4, {"vocab_size": 323}),
    "dense and sparse layers": (2, {"mlp_only_layers": [1]}),
    "all dense": (1, {"mlp_only_layers": [0, 1]}),
    "weights not normalised": (1, {"norm_topk_prob": False}),
    "biases": (1, {"attention_bias": True}),
    "biases, key heads on two chips each": (4, {"attention_bias": True}),
    "biases, query heads on two chips each": (8, {"attention_bias": True}),
    "query heads that read two key heads, on each chip": (2, {"num_attention_heads": 6, "num_key_value_heads": 3}),
    "two query heads of three that read one key head": (
        6,
        {"num_attention_heads": 12, "num_key_value_heads": 4, "num_experts": 6, "num_experts_per_tok": 2},
    ),
    "one kv head": (1, {"num_key_value_heads": 1}),
    "no gqa, wide heads": (1, {"num_key_value_heads": 4, "head_dim": 64}),
    "an expert a chip, every expert": (8, {"num_experts_per_tok": 8}),
    "more experts than topk takes at least": (1, {"num_experts": 72}),
    "a large eps": (1, {"rms_norm_eps": 1e-2}),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_model_against_the_reference(kind: str, tmp_path: Path, emulated: None) -> None:
    D, changes = KINDS[kind]
    directory = make(tmp_path, num_hidden_layers=2, **SIZES, **changes)
    model, reference = tt.load_model(directory, D), load_model(directory, "reference", dtype=torch.float32)
    texts = prompts([35, 1, 32], model.config.vocab_size)
    cache = model.new_cache(3, 40)
    for row in range(3):
        cache.open(row, 38)
    got = model(torch.tensor(sum(texts, [])), cache, cache.prefill([(0, 35), (1, 1), (2, 32)], [34, 35, 67]))
    for forced in prompts([3, 3], model.config.vocab_size, seed=2):
        want = torch.stack([reference(torch.tensor([text]))[0, -1] for text in texts])
        assert least_correlation(got, want) > 0.99
        texts = [[*text, token] for text, token in zip(texts, forced, strict=True)]
        got = model(torch.tensor(forced), cache, cache.decode(range(3), [len(text) - 1 for text in texts]))


def test_weights_and_keys_of_8_bits_and_split_experts_against_the_reference(tmp_path: Path, emulated: None) -> None:
    directory = make(tmp_path, **{**SIZES, "mlp_only_layers": [1], "moe_intermediate_size": 64})
    eight = "bfloat8_b,attention=bfloat8_b,dense=bfloat8_b,head=bfloat8_b"
    model = tt.load_model(directory, 2, weights=eight, split=True)
    reference = load_model(directory, "reference", dtype=torch.float32)
    texts = prompts([5, 1], model.config.vocab_size)
    cache = model.new_cache(2, 32, kv="bfloat8_b")
    assert {part.dtype for part in cache.k + cache.v} == {"bfloat8_b"}
    for row in range(2):
        cache.open(row, 8)
    got = model(torch.tensor(sum(texts, [])), cache, cache.prefill([(0, 5), (1, 1)], [4, 5]))
    for new in (3, 4):
        want = torch.stack([reference(torch.tensor([text]))[0, -1] for text in texts])
        assert least_correlation(got, want) > 0.99
        texts = [[*text, new] for text in texts]
        got = model(torch.tensor([new, new]), cache, cache.decode([0, 1], [len(text) - 1 for text in texts]))


def test_each_matrix_has_the_format_that_names_it(tmp_path: Path, emulated: None) -> None:
    directory = make(tmp_path, **{**SIZES, "mlp_only_layers": [1]})
    text = "bfloat4_b,bfloat8_b,attention=bfloat8_b,attention@1=bfloat16,dense=bfloat4_b,experts@2=bfloat8_b"
    model = tt.load_model(directory, weights=text)
    first, second, third = model._layers
    assert [str(layer.mlp.experts.formats) for layer in (first, third)] == ["bfloat4_b,bfloat8_b", "bfloat8_b"]
    assert [first.mlp.experts.gate.dtype, first.mlp.experts.down.dtype] == ["bfloat4_b", "bfloat8_b"]
    assert [layer.qkv.weight.dtype for layer in model._layers] == ["bfloat8_b", "bfloat16", "bfloat8_b"]
    assert second.mlp.up.weight.dtype == "bfloat4_b" and third.out.weight.dtype == "bfloat8_b"
    assert first.mlp.linear.weight.dtype == first.attention_norm.dtype == "bfloat16"


@pytest.mark.parametrize("chunk, longest", [(7, 4096), (200, 64)])
def test_prompts_in_pieces(chunk: int, longest: int, monkeypatch: pytest.MonkeyPatch, emulated: None) -> None:
    """As generate cuts them, or as passes do; an engine serves again."""
    monkeypatch.setattr(models, "LONGEST", longest)
    ids = encode(["Copy: AB12", "Sort: " + "VBYIJAQ" * 12, "What is 38+990?"])
    model = tt.load_model(TINY)
    engine = engine_for(model, ids, 5)
    want = generate(load_model(TINY, "reference"), ids, max_new_tokens=5)
    for _ in range(2):
        assert generate(model, ids, max_new_tokens=5, prefill_chunk=chunk, engine=engine).tokens == want.tokens


def test_a_pass_takes_what_a_program_takes_and_the_plan_counts(emulated: None) -> None:
    model = tt.load_model(TINY)
    longest = model.cache_of_pages(1, 32, None).packer.longest
    sizes = model_sizes(model.config)
    made = plan_model("tiny", sizes, "1x1", "p150", "bfloat16", 32, sizes.context)
    assert longest == max(plan.T for plan in made.plans) == 4096
    assert any(f"at T = {min(longest, 32 * sizes.context)}," in part.what for part in made.parts)


def test_requests_that_come_at_different_times(emulated: None) -> None:
    """A prompt that runs beside a decode step, a row that another request had: each gets what it gets alone."""
    model = tt.load_model(TINY)
    ids = encode(["Copy: AB12", "Reverse: of this a whole page is filled, and more", "What is 38+990?"])
    alone = [generate(model, [prompt], max_new_tokens=6).tokens[0] for prompt in ids]
    engine = Engine(model, 2, 128, memory=6 * PagedCache.page_bytes(model.cache_sizes))
    got: dict[int, list[int]] = {}
    numbers, arrivals = [engine.add(ids[0], max_new_tokens=6)], {2: ids[1], 3: ids[2]}
    for step in range(30):
        for token in engine.step():
            got.setdefault(token.sequence, []).append(token.token)
        if step in arrivals:
            numbers.append(engine.add(arrivals[step], max_new_tokens=6))
    assert not engine.busy and [got[number] for number in numbers] == alone
    assert engine.load().free_pages == engine.cache.total == 6


def test_32_sequences_that_end_at_different_times(emulated: None) -> None:
    """Rows leave, others move up; sampled sequences repeat."""
    words = ["A1", "ZZ9", "Q", "K7M2P4", "08"]
    ids = encode([f"Copy: {words[i % 5]}{i}" for i in range(32)])
    model = tt.load_model(TINY)
    want = generate(load_model(TINY, "reference"), ids, max_new_tokens=6)
    got = generate(model, ids, max_new_tokens=6)
    assert got.tokens == want.tokens and len({len(tokens) for tokens in got.tokens}) > 2
    sampled = [generate(model, ids[:3], max_new_tokens=3, temperature=0.8, seed=3).tokens for _ in range(2)]
    assert sampled[0] == sampled[1]
