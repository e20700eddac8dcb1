"""Runs of the whole model: the bundled checkpoint on one device, and on a mesh. See tenstorrent_runs.py."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from tenstorrent_setup import mesh_D, mesh_run, run
from ttnn_moe import tenstorrent
from ttnn_moe.models.qwen3 import TINY, Qwen3Moe, Qwen3MoeConfig, Tokenizer, generate, load_model, tt
from ttnn_moe.models.qwen3.runtime.candidates import Candidates
from ttnn_moe.models.qwen3.runtime.sampling import Sampling
from ttnn_moe.models.qwen3.tiny import tasks
from ttnn_moe.models.qwen3.weights import randomize

LEAST_CORRELATION = 0.999
LEAST_OF_A_MESH = 0.9989  # chips round their parts of a sum; 0.99899 on Wormhole's 1x8
LEAST_OF_FEWER_BITS = 0.99  # keys and values of 8 bits; one wide layer of random weights, with bf16 sums
# longer than a page, and shorter
PROMPTS = ("Copy: AB12", "Reverse: of this a whole page is filled, and more", "What is 38+990?")


def encode(prompts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_directory(TINY)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True) for p in prompts
    ]
    return [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]


def least_correlation(got: Tensor, want: Tensor) -> float:
    """Of the rows of logits."""
    assert got.shape == want.shape and got.isfinite().all()
    return min(float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in zip(got.float(), want.float(), strict=True))


def check_logits(D: int, steps: int) -> None:
    """Three prompts in one pass, then decode steps fed with the reference's tokens; a row leaves in between."""
    model, reference = tt.load_model(TINY, D), load_model(TINY, "reference")
    ids = encode(list(PROMPTS))
    cache = model.new_cache(3, 128)
    rows = [2, 0, 1]  # any order
    for row in rows:
        cache.open(row, 128)
    ends = torch.tensor([len(one) for one in ids]).cumsum(0) - 1
    step = cache.prefill([(row, len(one)) for row, one in zip(rows, ids, strict=True)], ends.tolist())
    got = model(torch.tensor(sum(ids, [])), cache, step)
    for at in range(steps + 1):
        want = torch.stack([reference(torch.tensor([one]))[0, -1] for one in ids])
        found = least_correlation(got, want)
        print(f"logits, step {at}: error {1 - found:.1e} of the correlation")
        least = LEAST_CORRELATION if D == 1 else LEAST_OF_A_MESH
        assert found > least, f"step {at}: logits correlate by {found}"
        if at == steps:
            return
        for one, token in zip(ids, want.argmax(-1).tolist(), strict=True):
            one.append(token)
        if at == 1:
            cache.close(rows.pop(1))
            del ids[1]
        step = cache.decode(rows, [len(one) - 1 for one in ids])
        got = model(torch.tensor([one[-1] for one in ids]), cache, step)


def check_answers(D: int, names: list[str], new_tokens: int = 24) -> None:
    """Greedy answers to examples of tasks, through generate."""
    options = {"recall": {"context": (60, 100)}}
    ids = encode([tasks.examples(name, "heldout", 1, **options.get(name, {}))[0].prompt for name in names])
    tokenizer = Tokenizer.from_directory(TINY)
    want = generate(load_model(TINY, "reference"), ids, max_new_tokens=new_tokens, tokenizer=tokenizer)
    model, start = tt.load_model(TINY, D), time.perf_counter()
    got = generate(model, ids, max_new_tokens=new_tokens, tokenizer=tokenizer)
    took = time.perf_counter() - start
    print(f"{got.stats.new_tokens} tokens, {got.stats.decode_steps} steps: {took:.0f} s with compiling; no error")
    assert got.texts == want.texts and got.tokens == want.tokens
    assert got.finish == want.finish


@run
def model_logits() -> None:
    check_logits(1, steps=3)


@run
def model_answers() -> None:
    check_answers(1, list(tasks.TASKS))


def check_weights_on_disk(D: int) -> None:
    """Made once, found again: the same logits."""
    from ttnn_moe.tenstorrent import files

    files.LEAST_CACHED_BYTES = 0
    ids = encode(["Copy: AB12"])[0]

    def logits() -> Tensor:
        model = tt.load_model(TINY, D)
        cache = model.new_cache(1, 32)
        cache.open(0, 32)
        return model(torch.tensor(ids), cache, cache.prefill([(0, len(ids))], [len(ids) - 1]))

    with tempfile.TemporaryDirectory() as folder:
        os.environ[files.CACHE] = folder
        first = logits()
        made = {path: path.stat().st_mtime_ns for path in Path(folder).iterdir()}
        assert len(made) > 20
        assert torch.equal(first, logits())
        assert made == {path: path.stat().st_mtime_ns for path in Path(folder).iterdir()}


@run
def model_weights_on_disk() -> None:
    check_weights_on_disk(1)


@mesh_run
def mesh_model_logits() -> None:
    check_logits(mesh_D(), steps=2)


@mesh_run
def mesh_model_answers() -> None:
    check_answers(mesh_D(), list(tasks.TASKS), new_tokens=5)


@run
def model_qwen3_layer() -> None:
    """One layer of Qwen3-30B-A3B's sizes, but for 8 experts: a prompt and its next token; then 32 rows that decode."""
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=2048,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=256,
        rope_theta=1e6,
        moe_intermediate_size=768,
        num_experts=8,
        num_experts_per_tok=2,
    )
    host = Qwen3Moe.empty(config, "reference", torch.bfloat16, "cpu")
    randomize(host)
    model = tt.Qwen3MoeTT(config, tenstorrent.open_device())
    model.put_top(host)
    model.put_layer(host.layers[0])
    cache = model.new_cache(32, 96)
    for row in range(32):
        cache.open(row, 96)
    ids = torch.arange(7, 507, 13)[:33].tolist()
    got = [model(torch.tensor(ids[:32]), cache, cache.prefill([(0, 32)], [31]))]
    # every row gets the first one's keys and values: its pages
    cache._own[:32] = cache._own[:1] * 32
    got.append(model(torch.tensor(ids[32:] * 32), cache, cache.decode(range(32), [32] * 32)))
    want = host(torch.tensor([ids]))[0, -2:]
    for name, logits, row in zip(("prompt", "32 rows"), got, want, strict=True):
        found = least_correlation(logits, row.expand_as(logits))
        print(f"{name}: error {1 - found:.1e} of the correlation")
        assert found > LEAST_OF_FEWER_BITS


def check_candidates(found: Candidates, samplings: list[Sampling]) -> None:
    """They are the largest logits; the mass is their sum."""
    logits = found.whole()
    assert torch.equal(found.first, logits.float().argmax(1))
    assert torch.equal(found.values[:, :32], logits.float().topk(32).values)
    assert torch.equal(logits.gather(1, found.tokens).float(), found.values)
    temperatures = torch.tensor([one.temperature for one in samplings]).double()[:, None]
    want = ((logits.double() - logits.double().amax(1, keepdim=True)) / temperatures).exp().sum(1)
    apart = float((found.mass / want - 1).abs().max())
    print(f"mass: error {apart:.1e}")
    assert apart < 3e-2  # Wormhole's simulator adds in bf16


@run
def model_eight_bit_keys_and_draws() -> None:
    """Keys and values in bfloat8_b; candidates and mass of a prompt's step and of decode steps."""
    model, reference = tt.load_model(TINY), load_model(TINY, "reference")
    ids, samplings = encode(list(PROMPTS[:2])), [Sampling(0.7), Sampling(1.5, 0, 0.9)]
    cache = model.new_cache(2, 128, kv="bfloat8_b")
    for row in (0, 1):
        cache.open(row, 128)
    first = [(row, len(one)) for row, one in enumerate(ids)]
    step = cache.prefill(first, [len(ids[0]) - 1, len(ids[0]) + len(ids[1]) - 1])
    words = torch.tensor(sum(ids, []))
    for at in range(3):
        found = model.candidates(words, cache, step, samplings)
        check_candidates(found, samplings)
        want = torch.stack([reference(torch.tensor([one]))[0, -1] for one in ids])
        least = least_correlation(found.whole(), want)
        print(f"bfloat8_b keys, step {at}: error {1 - least:.1e} of the correlation")
        assert least > LEAST_OF_FEWER_BITS
        words = want.argmax(-1)
        for one, token in zip(ids, words.tolist(), strict=True):
            one.append(token)
        step = cache.decode([0, 1], [len(one) - 1 for one in ids])


@mesh_run
def mesh_model_weights_on_disk() -> None:
    check_weights_on_disk(mesh_D())
