"""A bucketed cache on a GPU: kernels and torch forms leave the same bits in the tiers, and attend alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from ttnn_moe.choice import plain
from ttnn_moe.kv.bucketed.cache import BucketedCache
from ttnn_moe.kv.cache import CacheSizes
from ttnn_moe.kv.step import Step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")]
LAYERS, KV_HEADS, HEADS, D = 2, 2, 16, 128


def fed(bits: float, steps: list[Callable[[BucketedCache], Step]]) -> tuple[BucketedCache, list[Tensor]]:
    """A cache after steps of random tokens, and what its attention gave."""
    sizes = CacheSizes(LAYERS, HEADS, KV_HEADS, D, torch.bfloat16, torch.device("cuda"))
    cache, out = BucketedCache(sizes, 2, 2048, 64, bits), []
    cache.equalise(*(0.5 + torch.rand(2, LAYERS, D, generator=torch.Generator().manual_seed(0))).cuda())
    for row in range(2):
        cache.open(row, 2048)
    for i, plan in enumerate(steps):
        random = torch.Generator("cuda").manual_seed(i)
        step = plan(cache)
        for layer in range(LAYERS):
            q, k, v = (
                torch.randn(len(step.rows), n, D, generator=random, device="cuda").bfloat16()
                for n in (HEADS, KV_HEADS, KV_HEADS)
            )
            cache.write(layer, k, v, step)
            out.append(cache.attend(layer, q, step))
    cache.decode([0], [cache.lengths[0]])  # what is due moves
    return cache, out


@pytest.mark.parametrize("bits", [3, 6, 16])
def test_kernels_and_torch_forms_leave_the_same_bits(bits: float) -> None:
    chunks = [(0, 700), (0, 300), (1, 9)]
    steps: list[Callable[[BucketedCache], Step]] = [
        lambda cache: cache.prefill([chunks[0]], [699]),
        lambda cache: cache.prefill(chunks[1:], [299, 308]),
        *(lambda cache, i=i: cache.decode([1, 0], [9 + i, 1000 + i]) for i in range(60)),
        lambda cache: cache.prefill([(1, 300)], [299], [(0, 1060)]),
        lambda cache: cache.decode([0], [1061]),
    ]
    # the host keeps lengths of prompts alone
    steps[-2] = lambda cache: _at(cache, 1, 69).prefill([(1, 300)], [299], [(0, 1060)])
    found = []
    for how in (nullcontext(), plain()):
        with how:
            found.append(fed(bits, steps))
    (one, got), (two, want) = found
    for bits_of, layers in one.places.tiers.items():
        mine, other = layers.together, two.places.tiers[bits_of].together
        for x, y in ((mine.payload, other.payload), (mine.scales, other.scales), (mine.token_ids, other.token_ids)):
            assert torch.equal(x, y)
    for x, y in zip(got, want, strict=True):
        assert float((x.float() - y.float()).norm() / y.float().norm()) < 0.01


def _at(cache: BucketedCache, row: int, length: int) -> BucketedCache:
    """Tell a cache how many tokens decode steps gave a row, as a scheduler does."""
    cache.lengths[row] = length
    return cache
