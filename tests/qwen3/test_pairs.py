"""Rows of near-duplicate keys and their values, for long recalls."""

from __future__ import annotations

import torch

from ttnn_moe.models.qwen3.tiny.pairs import Pairs
from ttnn_moe.models.qwen3.tiny.tokenizer import build


def test_every_repeated_key_has_its_value_and_families_differ_in_one_letter() -> None:
    pairs = Pairs(letters=5, family=8, skew=1.0)
    ids, kinds = pairs.rows(3, 512, torch.Generator().manual_seed(0))
    again, _ = pairs.rows(3, 512, torch.Generator().manual_seed(0))
    assert torch.equal(ids, again), "a seed decides the rows"
    tokenizer = build()
    for row, kind in zip(ids, kinds, strict=True):
        told = tokenizer.decode(row.tolist()).split()
        assert len(told) == 512 // pairs.width
        values: dict[str, str] = {}
        for n, (key, value) in enumerate(pair.split("=") for pair in told):
            asked = kind[n * pairs.width :][: pairs.width].tolist()
            assert asked == ([0] * 6 + [3, 3, 0] if n >= int(len(told) * pairs.new) else [0] * pairs.width)
            assert values.setdefault(key, value) == value
        assert len(values) == int(len(told) * pairs.new), "no key is told twice"
        near = [sum(a != b for a, b in zip(one, two, strict=True)) for one in values for two in values if one != two]
        assert near.count(1) >= len(values), "near-duplicates"
