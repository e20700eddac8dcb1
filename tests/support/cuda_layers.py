"""Layers of random weights and routings on a GPU, and what every set of kernels is asked there: graphs, equal bits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import ttnn_moe
from ttnn_moe import Experts, Problem, Routing
from ttnn_moe.selfcheck.bounds import poisoned


def random_experts(E: int, H: int, I: int, dtype: torch.dtype = torch.bfloat16, order: str = "halves") -> Experts:
    gate_up = torch.randn(E, 2 * I, H, device="cuda", dtype=dtype) * H**-0.5
    down = torch.randn(E, H, I, device="cuda", dtype=dtype) * I**-0.5
    return Experts.dense(gate_up, down, gate_up_order=order)


def random_routing(T: int, E: int, K: int, skew: float = 0.0) -> Routing:
    """Each token's K experts differ; with skew, low ones are chosen more often."""
    scores = torch.rand(T, E, device="cuda").log() / torch.arange(1, E + 1, device="cuda") ** -skew
    weights, ids = torch.softmax(scores, -1).topk(K)
    return Routing.from_topk(ids.int(), weights / weights.sum(-1, keepdim=True), E)


def assert_same_bits(T: int, experts: Experts | None = None) -> None:
    """Twenty more calls give what the first one gave, and so do first replays of new graphs. experts: 32 of H = 256.

    The first replay finds no code in the instruction caches: warps drift apart as they never do later.
    """
    experts = experts or random_experts(32, 256, 128)
    H, routing = experts.H, random_routing(T, experts.E, min(8, experts.E), 0.3)
    hidden = torch.randn(T, H, device="cuda").bfloat16()
    first = ttnn_moe.moe(hidden, routing, experts, backend="cuda")
    again = poisoned(T, H, dtype=torch.bfloat16, device="cuda")
    for _ in range(20):
        ttnn_moe.moe(hidden, routing, experts, out=again.fill_(1e4), backend="cuda")
        assert torch.equal(first.view(torch.int16), again.view(torch.int16))
    other = torch.randn(1024, 1024, device="cuda")
    for _ in range(20):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ttnn_moe.moe(hidden, routing, experts, out=again, backend="cuda")
        again.fill_(1e4)
        (other @ other).normal_().sum()  # other kernels' code
        torch.cuda.synchronize()
        graph.replay()
        assert torch.equal(first.view(torch.int16), again.view(torch.int16))


def replays(experts: Experts, T: int, K: int, calls: int = 1) -> Iterator[tuple[Tensor, Routing, Tensor]]:
    """Capture a prepared layer in a CUDA graph, `calls` times over; then hidden, routing and output of each replay:
    every pair on one expert, no expert at all, a skewed routing."""
    E, H = experts.E, experts.H
    layer = ttnn_moe.prepare(Problem.of(T, K, experts, torch.bfloat16), experts, backend="cuda")
    hidden = torch.randn(T, H, device="cuda").bfloat16()
    routing = random_routing(T, E, K)
    ids, weights = routing.topk_ids.clone(), routing.topk_weights
    out = layer(hidden, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            layer(hidden, ids, weights, out=out)
    for other in (torch.full_like(ids, 3), torch.full_like(ids, -1), random_routing(T, E, K, 0.7).topk_ids):
        ids.copy_(other)
        hidden.normal_()
        out.fill_(1e4)
        graph.replay()
        yield hidden, Routing.from_topk(ids, weights, E), out
