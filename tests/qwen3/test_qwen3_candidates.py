"""Tokens drawn from the largest logits alone are those that the whole logits give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ttnn_moe.models.qwen3.runtime.candidates import Candidates, choose_among, needs_mass
from ttnn_moe.models.qwen3.runtime.sampling import Sampling, choose

R, V, N = 64, 500, 32
SAMPLINGS = {
    "top k": (Sampling(0.7, 20), False),
    "top k and p": (Sampling(1.3, 32, 0.8), False),
    "top p": (Sampling(0.6, 0, 0.95), False),
    "all of a sharp row": (Sampling(0.2), False),
    "all of a flat row": (Sampling(2.0), True),
    "top p of a flat row": (Sampling(3.0, 0, 0.9), True),
    "more than the candidates": (Sampling(1.0, 40, 0.9), True),
    "colder than devices add": (Sampling(1e-6), True),
}


def candidates(logits: Tensor, sampling: Sampling, asked: list[int]) -> Candidates:
    values, tokens = logits.topk(N)
    mass = ((logits - values[:, :1]).double() / sampling.temperature).exp().sum(1)

    def whole() -> Tensor:
        asked.append(1)
        return logits

    return Candidates(values, tokens, tokens[:, 0], mass, whole)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_draws_of_the_whole_logits(name: str) -> None:
    sampling, needs_whole = SAMPLINGS[name]
    g = torch.Generator().manual_seed(0)
    logits, uniform = torch.randn(R, V, generator=g) * 3, torch.rand(R, generator=g, dtype=torch.float64)
    asked: list[int] = []
    found = candidates(logits, sampling, asked)
    want = choose(logits, sampling, uniform)
    assert torch.equal(choose_among(found, sampling, uniform), want)
    assert bool(asked) == needs_whole
    some = torch.tensor([5, 2, 63])
    assert torch.equal(choose_among(found[some], sampling, uniform[some]), want[some])
    halves = Candidates.joined([found[torch.arange(20)], found[torch.arange(20, R)]])
    assert torch.equal(choose_among(halves, sampling, uniform), want)


def test_what_needs_the_mass() -> None:
    asked = [Sampling(), Sampling(1.0, 20), Sampling(1.0, 40), Sampling(1.0), Sampling(1.0, 0, 0.5)]
    assert [needs_mass(one) for one in asked] == [False, False, False, True, True]


def test_fewer_tokens_than_candidates() -> None:
    """Places that hold no token are never drawn."""
    values = torch.tensor([[2.0, 1.0, -torch.inf, -torch.inf]])
    tokens, mass = torch.tensor([[1, 0, 7, 9]]), torch.tensor([1.5]).double()
    found = Candidates(values, tokens, tokens[:, 0], mass, lambda: values)
    for sampling in (Sampling(100.0, 4), Sampling(100.0, 4, 0.9)):
        drawn = [int(choose_among(found, sampling, torch.tensor([u]).double())) for u in (0.0, 0.5, 0.999999)]
        assert set(drawn) == {0, 1}
