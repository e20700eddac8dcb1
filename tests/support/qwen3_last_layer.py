"""Prefills whose last layer runs only for the tokens whose logits are wanted, against those where it runs for all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qwen3_checkpoints import prompts, relative_error
from ttnn_moe import decoder
from ttnn_moe.kv.cache import RowCache
from ttnn_moe.kv.paged import PagedCache
from ttnn_moe.kv.step import DecodeStep, Step
from ttnn_moe.models.qwen3 import Qwen3Moe
from ttnn_moe.models.qwen3.runtime.graphs import Again
from ttnn_moe.models.qwen3.runtime.prefill_graphs import PrefillGraphs
from ttnn_moe.models.qwen3.runtime.runner import Prompts, run_prefill

ROWS, LONGEST = 3, 12
CAPACITY = 2 * LONGEST
FP32 = 1e-4

Wanted = Callable[[random.Random, Sequence[int], int], Sequence[int]]
"""Whose logits a step asks for, of the last tokens of prompts that end in it, and of all its prompt tokens."""


def ends(rng: random.Random, last: Sequence[int], n: int) -> Sequence[int]:
    return last


def any_tokens(rng: random.Random, last: Sequence[int], n: int) -> Sequence[int]:
    """Several of one prompt too; none; all."""
    return sorted(rng.sample(range(n), rng.choice([0, n, rng.randint(0, n)])))


def opened(model: Qwen3Moe, rows: int, capacity: int, page: int = 64) -> PagedCache:
    """The model's cache, with room for `capacity` tokens in every row."""
    cache = model.new_cache(rows, capacity, page=page)
    for row in range(rows):
        cache.open(row, capacity)
    return cache


def cache_of(model: Qwen3Moe, page: int = 64) -> PagedCache:
    return opened(model, ROWS, CAPACITY, page)


def rows_of_last_layer(model: Qwen3Moe, seen: list[int]) -> Callable[[], None]:
    """Note how many tokens count in the MLP of the last layer, from now until the result is called."""

    def note(mlp: object, args: tuple[Tensor, object, Step]) -> None:
        rows, count = len(args[0]), args[2].num_tokens
        seen.append(rows if count is None else int(count))

    return model.layers[-1].mlp.register_forward_pre_hook(note).remove


@torch.inference_mode()
def check(
    ours: Qwen3Moe,
    theirs: Qwen3Moe,
    cache: RowCache,
    seed: int,
    wanted: Wanted = ends,
    fixed: PrefillGraphs | None = None,
    longest: int = LONGEST,
) -> None:
    """Prompts in pieces of any length, with rows that decode; then a decode step of every row, which reads all keys.

    Args:
        theirs: the same weights on the CPU, in torch. cache: of ROWS empty rows of CAPACITY tokens.
        fixed: captured steps, which must hold these. longest: prompt tokens of a step.
    """
    rng, device = random.Random(seed), ours.device
    lengths = [rng.randint(1, LONGEST) for _ in range(ROWS)]
    texts = prompts([CAPACITY] * ROWS, ours.config.vocab_size, seed)
    other = cache_of(theirs)
    done, seen = [0] * ROWS, []
    stop = rows_of_last_layer(ours, seen)
    while any(at < n for at, n in zip(done, lengths, strict=True)):
        decoding = [(row, at) for row, at in enumerate(done) if lengths[row] <= at < CAPACITY - 1]
        ids, chunks, last = [], [], []
        left = rng.randint(1, longest)
        for row, n in enumerate(lengths):
            piece = texts[row][done[row] : min(n, done[row] + left)]
            if piece and left:
                left -= len(piece)
                done[row] += len(piece)
                ids += piece
                chunks.append((row, len(piece)))
                last += [len(ids) - 1] * (done[row] == n)
        asked = wanted(rng, last, len(ids))
        ids = torch.tensor(ids)
        fed = torch.tensor([texts[row][at] for row, at in decoding], dtype=torch.int64)
        step = other.prefill(chunks, asked, decoding)
        with decoder.plain():
            want = theirs(torch.cat((fed, ids)), other, replace(step, logits_at=None))[step.logits_at]
        seen.clear()
        if fixed is None:
            got = run_prefill(ours, cache, Prompts(ids, chunks, asked), decoding, fed.to(device))
        else:
            got = fixed.run(ids, chunks, asked, decoding, fed.to(device))
            assert got is not None
        R = len(decoding) + len(asked)
        if fixed is None or isinstance(fixed.graphs, Again):  # a replay calls no module
            assert seen == [R] * (R > 0 or fixed is not None)
        assert got.shape == want.shape
        assert not R or relative_error(got.cpu(), want) <= FP32
        for row, _ in decoding:
            done[row] += 1
    stop()
    fed, rows, positions = (
        torch.tensor(values, device=device)
        for values in ([text[at] for text, at in zip(texts, done, strict=True)], range(ROWS), done)
    )
    step = DecodeStep(rows, positions, max(done) + 1)
    with decoder.plain():
        want = theirs(fed.cpu(), other, replace(step, rows=rows.cpu(), positions=positions.cpu()))
    assert relative_error(ours(fed, cache, step).cpu(), want) <= FP32
