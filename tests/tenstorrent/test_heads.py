"""Attention heads on a mesh: every query head is summed once, and stands where the head that it reads is."""

from __future__ import annotations

import pytest

from ttnn_moe.errors import ContractError
from ttnn_moe.tenstorrent.heads import HeadShare

MODELS = [(32, 4), (4, 2), (12, 4), (6, 3), (8, 8), (5, 1), (64, 8)]


@pytest.mark.parametrize(("heads", "kv_heads"), MODELS)
def test_shares_of_every_mesh(heads: int, kv_heads: int) -> None:
    for D in range(1, 33):
        if heads % D and D % heads:
            with pytest.raises(ContractError, match=f"got {heads} query heads on 1x{D}"):
                HeadShare.of(heads, kv_heads, D)
            continue
        share = HeadShare.of(heads, kv_heads, D)
        summed = [head for chip in range(D) if share.adds(chip) for head in share.queries(chip)]
        assert summed == list(range(heads))
        for chip in range(D):
            mine, keys = share.queries(chip), share.keys(chip)
            assert (len(mine), len(keys)) == (share.heads, share.kv_heads)
            # ttnn's operators give query i of a chip the key head i // (heads / kv_heads)
            read = [keys[i // (share.heads // share.kv_heads)] for i in range(share.heads)]
            assert read == [head // (heads // kv_heads) for head in mine]


def test_key_heads_are_held_as_rarely_as_can_be() -> None:
    assert [HeadShare.of(32, 4, D).kv_heads for D in (1, 2, 4, 8, 16, 32)] == [4, 2, 1, 1, 1, 1]
    assert HeadShare.of(4, 2, 8) == HeadShare(8, heads=1, kv_heads=1, group=2, copies=2)
