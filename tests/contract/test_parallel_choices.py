"""What an exchange takes: the first that runs, the order of a sum, shared rings, ids of 64 bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from parallel_layers import ALONE, MOST, E, H, I, K, experts_of_all, inputs, one_process, placement_of
from ttnn_moe import Experts, Placement, Problem, Routing
from ttnn_moe.errors import ContractError
from ttnn_moe.parallel.exchanges import AllGather, Topology, agreement, hierarchical
from ttnn_moe.parallel.exchanges.first_call import FirstCall
from ttnn_moe.parallel.exchanges.peer_memory import PeerMemoryExchange
from ttnn_moe.reference import ReferenceBackend


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Placement]:
    """A process group of this process only."""
    with one_process(tmp_path) as placement:
        yield placement


class Runs:
    """A Mover; what it runs, or why it cannot."""

    def __init__(self, name: str, error: Exception | None):
        self.name, self._error = name, error

    def __call__(self, hidden: torch.Tensor, routing: Routing, experts: Experts) -> str:
        if self._error is not None:
            raise self._error
        return f"by {self.name}"


@pytest.mark.parametrize(
    "errors, taken, made",
    [
        ([None, None], "a", "a"),
        ([RuntimeError("of a"), TypeError("of b"), None], "c", "abc"),
        ([RuntimeError("of a"), RuntimeError("of b")], RuntimeError("of b"), "ab"),  # nothing else is left
        ([ContractError("of a"), None], ContractError("of a"), "a"),  # what breaks the contract breaks it everywhere
    ],
)
def test_the_first_call_takes_what_runs(
    errors: list[Exception | None], taken: str | Exception, made: str, alone: Placement
) -> None:
    names: list[str] = []

    def maker(name: str, error: Exception | None) -> Runs:
        names.append(name)
        return Runs(name, error)

    exchange = FirstCall([partial(maker, *one) for one in zip("abc", errors, strict=False)], None)  # type: ignore[arg-type]
    hidden, ids, weights = inputs(0, MOST)
    call = hidden, Routing.from_topk(ids, weights, E), experts_of_all()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if isinstance(taken, Exception):
            with pytest.raises(type(taken), match=str(taken)):
                exchange(*call)
        else:
            assert [exchange(*call) for _ in range(2)] == [f"by {taken}"] * 2
    assert "".join(names) == made and exchange.name == made[-1] and len(warned) == len(made) - 1


@pytest.mark.parametrize("mine, others, ordered", [("strict", True, False), ("", True, True), ("true", False, True)])
def test_the_library_adds_where_every_rank_fixes_its_order(
    mine: str, others: bool, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_DETERMINISTIC", mine)
    monkeypatch.setattr(agreement, "gather", lambda asked, group: [asked, others, others, others])
    assert AllGather.of(ALONE, Topology(placement_of(4, 0), ReferenceBackend())).ordered == ordered


def test_the_hierarchical_exchange_of_cpus_carries_no_fp16() -> None:
    def why_not(wire: torch.dtype) -> str | None:
        problem = Problem(MOST, E, K, H, I, torch.float16, D=2)
        topology = Topology(placement_of(2, 0), ReferenceBackend(), wire=wire)
        return hierarchical.SharedMemoryExchange.why_not(problem, topology)

    assert "to fix it: wire=torch.float32" in str(why_not(torch.float16))
    assert "float32" not in str(why_not(torch.float32))


def test_layers_share_rings_where_their_experts_lie_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings know which rank holds an expert."""
    world = type("World", (), {})()
    monkeypatch.setattr(hierarchical, "world_of", lambda group: world)
    monkeypatch.setattr(hierarchical, "_attach", lambda *_: None)
    monkeypatch.setattr(hierarchical, "Group", lambda *_: object())
    dealt, halves = placement_of(2, 0), Placement.uniform(E, 2, 0)
    one = Topology(dealt, ReferenceBackend())
    sizes = hierarchical.sizes_of(ALONE, one)
    made = hierarchical._group_of(sizes, one)
    assert hierarchical._group_of(sizes, replace(one, placement=placement_of(2, 0))) is made
    for other in (replace(one, placement=halves), replace(one, timeout=1.0)):
        assert hierarchical._group_of(sizes, other) is not made


def test_an_id_of_64_bits_does_not_wrap_around() -> None:
    """The kernels take int32, in which 2^32 + 1 would be expert 1."""

    class Channel:
        def dispatch(self, hidden: torch.Tensor, ids: torch.Tensor, *_: object) -> None:
            raise InterruptedError(str(ids.tolist()))

    exchange = PeerMemoryExchange.__new__(PeerMemoryExchange)
    exchange._channel = exchange._local = Channel()  # type: ignore[assignment]
    exchange._counts = torch.arange(2, dtype=torch.int32)[:, None]
    hidden, weights = torch.ones(1, H), torch.ones(1, 3)
    routing = Routing.from_topk(torch.tensor([[0, 2**32 + 1, E]]), weights, E)
    with pytest.raises(InterruptedError, match=r"\[\[0, -1, -1\]\]"):
        exchange.into(hidden, routing, torch.empty_like(hidden), False)
