"""Page tables of rows that come and go: past the pages of a row stand zeros, not pages of an earlier request."""

from __future__ import annotations

import torch

from ttnn_moe.kv.bucketed.cache import BucketedCache
from ttnn_moe.kv.cache import CacheSizes
from ttnn_moe.kv.paged import PagedCache

SIZES = CacheSizes(1, 2, 1, 32, torch.float32, torch.device("cpu"))


def test_of_a_paged_cache() -> None:
    cache = PagedCache(SIZES, 1, 128, 8, 16)
    for tokens in (128, 20):
        cache.open(0, tokens)
        pages, line = cache.needed(tokens), cache.table[0]
        assert line[:pages].all() and not line[pages:].any()
        cache.close(0)


def test_of_a_bucketed_cache() -> None:
    cache = BucketedCache(SIZES, 1, 1024, 32, 4, 32)
    own, places = cache.allocation, cache.places
    for tokens in (1024, 320):
        cache.open(0, tokens)
        places.refresh()
        for bits, n in own.pages_of(cache.room(0)).items():
            n += places.high_pages * (bits == own.high)
            line = places.tiers[bits].together.table[0]
            assert line[:n].all() and not line[n:].any(), (tokens, bits)
        cache.close(0)
