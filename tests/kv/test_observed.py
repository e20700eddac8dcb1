"""Which queries of a prompt say what its tokens weigh, and what they say."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ttnn_moe.kv.bucketed.prompts import APART, QUERIES, observed, observing


@given(st.integers(1, 5000))
def test_observing_queries_are_the_last_ones_evenly_apart(n: int) -> None:
    at = list(range(n))[observing(n)]
    assert len(at) == min(n, QUERIES) and at[-1] == n - 1 and at[0] >= n - APART * QUERIES
    assert len({b - a for a, b in zip(at, at[1:], strict=False)}) <= 1


def test_tokens_weigh_what_these_queries_attend() -> None:
    n, heads, kv_heads, D, h = 150, 4, 2, 32, 7
    q, k, high = torch.randn(n, heads, D), torch.randn(n, kv_heads, D), torch.randn(h, kv_heads, D)
    own, keys = observing(n), torch.cat((high, k))
    want = torch.zeros(h + n)
    for i in range(n)[own]:
        for head in range(heads):
            seen = keys[: h + i + 1, head // (heads // kv_heads)]
            want[: h + i + 1] += (seen @ q[i, head] / D**0.5).softmax(0)
    torch.testing.assert_close(observed(q, k, high), want)
    assert observed(q, k, None).shape == (n,)
