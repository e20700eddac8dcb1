"""What a layer of expert parallelism refuses, and a layer of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_layers import ALONE, MOST, E, H, experts_of_all, inputs, one_process, placement_of
from ttnn_moe import Placement, Routing, moe
from ttnn_moe.errors import BackendUnavailable, ContractError
from ttnn_moe.parallel import ExpertParallel
from ttnn_moe.parallel.hierarchical import Nodes
from ttnn_moe.reference import ReferenceBackend


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Placement]:
    """A process group of this process only."""
    with one_process(tmp_path) as placement:
        yield placement


def test_without_a_process_group() -> None:
    with pytest.raises(ContractError, match="torch.distributed is not started.*init_process_group"):
        ExpertParallel(ALONE, experts_of_all(), placement_of(1, 0))


def test_what_does_not_fit_is_refused(alone: Placement) -> None:
    experts = experts_of_all()
    with pytest.raises(ContractError, match="not that of this process group.*D=2.*expected D=1"):
        ExpertParallel(ALONE, experts.for_device(placement_of(2, 0)), placement_of(2, 0))
    with pytest.raises(ContractError, match="experts do not fit the problem"):
        ExpertParallel(replace(ALONE, H=32), experts, alone)
    with pytest.raises(ContractError, match="placement is for another number of experts"):
        ExpertParallel(replace(ALONE, E=16), experts, alone)
    with pytest.raises(ContractError, match="experts have another dtype"):
        ExpertParallel(replace(ALONE, dtype=torch.float16, out_dtype=torch.float16), experts, alone)
    with pytest.raises(ContractError, match="unknown exchange"):
        ExpertParallel(ALONE, experts, alone, exchange="pigeon")
    with pytest.raises(ContractError, match="wire"):
        ExpertParallel(ALONE, experts, alone, wire=torch.float16)
    for timeout in (0, -1.0, float("nan"), float("inf"), None, "30"):
        with pytest.raises(ContractError, match="timeout is no time to wait"):
            ExpertParallel(ALONE, experts, alone, timeout=timeout)  # type: ignore[arg-type]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"problem": "x"}, "no Problem; got 'x'"),
        ({"experts": None}, "no Experts; got None"),
        ({"placement": None}, "placement is no Placement; got None"),
        ({"group": "x"}, "group is no process group of this process; got 'x'"),
        ({"nodes": (1, 1)}, r"nodes is no Nodes; got \(1, 1\)"),
        ({"nodes": Nodes(1, 1)}, "only the exchange hierarchical has nodes; got exchange='auto'"),
        ({"nodes": Nodes(2, 2), "exchange": "all_to_all"}, "only the exchange hierarchical has nodes"),
        ({"backend": ["reference"]}, "backend is no name"),
        ({"exchange": ["all_to_all"]}, "unknown exchange"),
    ]
    for change, match in wrong:
        with pytest.raises(ContractError, match=match):
            ExpertParallel(**{"problem": ALONE, "experts": experts, "placement": alone, **change})
    with pytest.raises(BackendUnavailable, match="no exchange of its own"):
        ExpertParallel(ALONE, experts, alone, backend="reference", exchange="dispatch_combine")
    with pytest.raises(ContractError, match="divisible"):
        Placement.uniform(E, 3)


CALLS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "hidden does not fit": lambda a: a.update(hidden=a["hidden"].float()),
    "hidden does not fit the prepared problem": lambda a: a.update(hidden=a["hidden"][:, :32]),
    "on another device": lambda a: a.update(hidden=a["hidden"].to("meta")),
    "topk_ids has the wrong dtype": lambda a: a.update(topk_ids=a["topk_ids"].float()),
    "different devices": lambda a: a.update(topk_weights=a["topk_weights"].to("meta")),
    "num_tokens has the wrong form": lambda a: a.update(num_tokens=torch.ones(2, dtype=torch.int32)),
    "larger than the prepared problem": lambda a: a.update(
        (name, torch.cat([tensor, tensor])) for name, tensor in list(a.items())
    ),
    "out has the wrong dtype": lambda a: a.update(out=torch.empty(MOST, H, dtype=torch.float16)),
}


@pytest.mark.parametrize("words", CALLS)
def test_a_call_that_does_not_fit_is_refused(alone: Placement, words: str) -> None:
    layer = ExpertParallel(ALONE, experts_of_all(), alone, backend="reference")
    hidden, ids, weights = inputs(0, MOST)
    arguments = {"hidden": hidden, "topk_ids": ids, "topk_weights": weights}
    CALLS[words](arguments)
    with pytest.raises(ContractError, match=words):
        layer(**arguments)


def test_experts_that_lie_elsewhere_are_no_renewal(alone: Placement) -> None:
    layer = ExpertParallel(ALONE, experts_of_all(), alone, backend="reference")
    other = experts_of_all()
    moved = replace(other, tensors={name: tensor.clone() for name, tensor in other.tensors.items()})
    with pytest.raises(ContractError, match="other experts"):
        layer.renew(moved)


def test_one_process_is_the_whole_layer(alone: Placement) -> None:
    hidden, ids, weights = inputs(0, MOST)
    layer = ExpertParallel(ALONE, experts_of_all(), alone, backend="reference")
    want = moe(hidden, Routing.from_topk(ids, weights, E), experts_of_all(), backend="reference")
    torch.testing.assert_close(layer(hidden, ids, weights), want, equal_nan=True)


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_one_process_goes_on_where_its_experts_failed(
    alone: Placement, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other process is a call apart from it."""
    layer = ExpertParallel(ALONE, experts_of_all(), alone, backend="reference", exchange=exchange)
    want = layer(*inputs(0, MOST))

    def failing(*_: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patched, pytest.raises(MemoryError, match="no room"):
        patched.setattr(ReferenceBackend, "moe", failing)
        layer(*inputs(0, MOST))
    assert torch.equal(layer(*inputs(0, MOST)).nan_to_num(), want.nan_to_num())
