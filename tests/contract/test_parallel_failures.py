"""A rank whose own work fails within a call, and which goes on: what it and the others get, in this call and later."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ascend_stand_in
from model_ranks import by_ranks
from ttnn_moe import Experts, Placement, Problem, Routing, registry
from ttnn_moe.ascend import path
from ttnn_moe.errors import BackendUnavailable, ContractError, TtnnMoeError
from ttnn_moe.parallel import ExpertParallel, exchanges
from ttnn_moe.parallel import layer as layers
from ttnn_moe.parallel.exchanges import AllGather, AllToAll
from ttnn_moe.parallel.hierarchical import PeerStopped, group
from ttnn_moe.parallel.ranks import Ranks, RankStopped
from ttnn_moe.reference import ReferenceBackend
from ttnn_moe.selfcheck import parallel_cases

TIMEOUT = 20.0
NO_ROOM = MemoryError("no room")
# what fails, by the work of a call: before the first message, between messages, in the experts
WORK: dict[str, tuple[Any, str]] = {
    "before": (Routing, "ids_or"),
    "rows": (AllToAll, "_tokens"),
    "experts": (ReferenceBackend, "moe"),
    "npu experts": (path, "experts"),
}


def layer_of(rank: int, exchange: str, T: int = 8, **options: Any) -> Callable[..., torch.Tensor]:
    """Of two ranks; expert e multiplies by e + 1 and silu(1)."""
    registry.register("ascend", ascend_stand_in.TARGET)
    placement, I = Placement.uniform(4, 2, rank), 32
    gate_up = torch.cat([torch.ones(2, I, 64), torch.ones(2, I, 64)], 1) / 64
    down = torch.ones(2, 64, I) / I * (torch.arange(2) + 2 * rank + 1)[:, None, None]
    on_npu = exchange == "dispatch_combine"
    dtype = torch.bfloat16 if on_npu else torch.float32
    problem = Problem(T, 4, 2, 64, I, dtype, D=2)
    experts = Experts.dense(gate_up.to(dtype), down.to(dtype))
    return ExpertParallel(problem, experts, placement, None, "ascend" if on_npu else "reference", exchange, **options)


def calls(ranks: Ranks, exchange: str, where: str, error: Exception, auto: bool = False) -> tuple[list[Any], float]:
    """Three calls of a layer. In the first, this work fails on rank 0. What each call gave, and the seconds of all."""
    owner, name = WORK[where]
    works, failing = getattr(owner, name), [error] if ranks.rank == 0 else []

    def work(*given: Any, **options: Any) -> Any:
        if failing:
            raise failing.pop()
        return works(*given, **options)

    if auto:
        exchanges.automatic = lambda topology: (AllGather, AllToAll)
    layer = layer_of(ranks.rank, exchange)
    setattr(owner, name, work)
    ids, said, begin = torch.tensor([[0, 2], [1, 3]]).int(), [], time.monotonic()
    for _ in range(3):
        try:
            out = layer(torch.ones(2, 64, dtype=layer.problem.dtype), ids, torch.ones(2, 2))
            values = out[:, 0] / torch.nn.functional.silu(torch.ones(()))
            said.append("NaN" if out.isnan().all() else values.round().tolist())
        except (TtnnMoeError, MemoryError, ValueError) as failed:
            said.append((type(failed).__name__, getattr(failed, "peer", None), str(failed)))
    seconds = time.monotonic() - begin
    dist.barrier()  # what the ranks call besides is in step
    return said, seconds


RIGHT = [4.0, 6.0]
STOPPED = ("RankStopped", 0)


def short(said: list[Any]) -> list[Any]:
    return [one[:2] if isinstance(one, tuple) else one for one in said]


@pytest.mark.parametrize(
    "exchange, where, other",
    [
        ("all_to_all", "before", [STOPPED] * 3),
        ("all_to_all", "rows", ["NaN", STOPPED, STOPPED]),
        ("all_to_all", "experts", ["NaN", STOPPED, STOPPED]),
        ("all_gather", "before", ["NaN"] * 3),
        ("all_gather", "experts", ["NaN"] * 3),
    ],
)
def test_no_rank_waits_and_no_sum_is_wrong(exchange: str, where: str, other: list[Any], tmp_path: Path) -> None:
    """Else messages of two calls would meet, whose sizes may even be the same."""
    (own, one), (others, two) = by_ranks(calls, 2, tmp_path, exchange, where, NO_ROOM, timeout=TIMEOUT)
    assert short(own) == [("MemoryError", None), STOPPED, STOPPED] and short(others) == other
    for *_, text in [said for said in (*own, *others) if isinstance(said, tuple)]:
        assert "no room" in text
    for *_, text in [said for said in others if isinstance(said, tuple)]:
        assert "MemoryError: no room" in text and "look at rank 0's log first" in text
    assert max(one, two) < TIMEOUT / 2, "a rank waited for the timeout"


REFUSED: dict[str, dict[str, Any]] = {
    "another dtype": {"hidden": torch.ones(2, 64).half()},
    "too many tokens": {
        "hidden": torch.ones(9, 64),
        "topk_ids": torch.zeros(9, 2).int(),
        "topk_weights": torch.ones(9, 2),
    },
    "a broken promise": {"topk_ids": torch.zeros(2, 2).int()},
}


def refused(ranks: Ranks, exchange: str, wrong: dict[str, Any]) -> tuple[list[Any], float]:
    """Rank 0's first call is refused before it sends anything, and its caller goes on with another layer."""
    first, other = (layer_of(ranks.rank, exchange, ids="distinct") for _ in range(2))
    said, begin = [], time.monotonic()
    right = {"hidden": torch.ones(2, 64), "topk_ids": torch.tensor([[0, 2], [1, 3]]), "topk_weights": torch.ones(2, 2)}
    calls = [(first, right), (other, right)]
    for layer, given in [(first, {**right, **wrong}), *calls] if ranks.rank == 0 else calls:
        try:
            said.append("NaN" if layer(**given).isnan().all() else "numbers")
        except TtnnMoeError as failed:
            said.append((type(failed).__name__, getattr(failed, "peer", None)))
    return said, time.monotonic() - begin


@pytest.mark.parametrize(
    "exchange, stopped, other",
    [
        ("all_to_all", STOPPED, STOPPED),
        ("all_gather", STOPPED, "NaN"),
        ("hierarchical", ("PeerStopped", None), ("PeerStopped", None)),
    ],
)
@pytest.mark.parametrize("wrong", REFUSED)
def test_a_call_that_one_rank_refuses_meets_no_other_layers_call(
    wrong: str, exchange: str, stopped: Any, other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else both ranks return the experts of two layers, summed."""
    monkeypatch.setenv("TTNN_MOE_CHECK_IDS", "1")
    (own, one), (others, two) = by_ranks(refused, 2, tmp_path, exchange, REFUSED[wrong], timeout=TIMEOUT)
    assert own == [("ContractError", None), stopped, stopped] and others == [other] * 2
    assert max(one, two) < TIMEOUT / 2, "a rank waited for the timeout"


def told_of_refusal(ranks: Ranks) -> str:
    """What rank 1 knows of a call that rank 0 refused, and made no other after."""
    layer, begin = layer_of(ranks.rank, "all_to_all"), time.monotonic()
    if ranks.rank == 0:
        with pytest.raises(ContractError):
            layer(torch.ones(2, 32), torch.tensor([[0, 2], [1, 3]]), torch.ones(2, 2))
        ranks._store.wait(["known"])
        return ""
    while (found := ranks._faults.reported()) is None and time.monotonic() - begin < TIMEOUT / 4:
        time.sleep(0.01)
    ranks._store.set("known", "")
    return "" if found is None else f"{found.peer}: {found.why}"


def test_whoever_watches_learns_of_a_refused_call_at_once(tmp_path: Path) -> None:
    _, known = by_ranks(told_of_refusal, 2, tmp_path, timeout=TIMEOUT)
    assert known.startswith("0: ContractError: hidden does not fit"), known


def refused_beside(ranks: Ranks, exchange: str, T: int) -> list[Any]:
    """Rank 0's first call is refused, and its caller goes on with a layer whose messages have other sizes."""
    first, other = layer_of(ranks.rank, "all_gather"), layer_of(ranks.rank, exchange, T)
    ids, said = torch.tensor([[0, 2], [1, 3]]), []
    for layer in (first, other):
        try:
            layer(torch.ones(2, 32 if (ranks.rank, layer) == (0, first) else 64), ids, torch.ones(2, 2))
            said.append("numbers")
        except (TtnnMoeError, RuntimeError) as failed:
            said.append((type(failed).__name__, getattr(failed, "peer", None)))
    return said


@pytest.mark.parametrize("exchange, T", [("all_gather", 16), ("all_to_all", 8)])
def test_messages_of_other_sizes_end_no_process(exchange: str, T: int, tmp_path: Path) -> None:
    """Gloo aborts a process to which more comes than it waits for."""
    own, other = by_ranks(refused_beside, 2, tmp_path, exchange, T, timeout=6.0)
    assert own == [("ContractError", None), STOPPED]
    assert other is not None and "numbers" not in str(other)


def test_the_operators_of_npus_end_their_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others get NaN. This rank sends nothing more: they wait for it as for one that stopped."""
    monkeypatch.setenv("HCCL_BUFFSIZE", "200")
    own, others = by_ranks(npu_call, 2, tmp_path, timeout=TIMEOUT)
    assert short(own) == [("MemoryError", None), STOPPED] and others == ["NaN"]


def npu_call(ranks: Ranks) -> list[Any]:
    experts, said = path.experts, []

    def failing(*given: Any) -> Any:
        if ranks.rank == 0:
            raise NO_ROOM
        return experts(*given)

    path.experts = failing
    layer = layer_of(ranks.rank, "dispatch_combine")
    for _ in range(2 - ranks.rank):
        try:
            out = layer(torch.ones(2, 64).bfloat16(), torch.tensor([[0, 2], [1, 3]]).int(), torch.ones(2, 2))
            said.append("NaN" if out.isnan().all() else "numbers")
        except (MemoryError, RankStopped) as failed:
            said.append((type(failed).__name__, getattr(failed, "peer", None), str(failed)))
    return said


def test_auto_takes_the_next_exchange_where_one_fails_between_its_messages(tmp_path: Path) -> None:
    failing = ValueError("CANN takes no such argument")
    for said, seconds in by_ranks(calls, 2, tmp_path, "auto", "experts", failing, True, timeout=TIMEOUT):
        assert said == [RIGHT] * 3 and seconds < TIMEOUT / 2, said


def test_all_ranks_stop_where_the_first_call_of_auto_fails_for_good(tmp_path: Path) -> None:
    """The others wait for what a rank says of its first call, whatever failed."""
    own, others = by_ranks(calls, 2, tmp_path, "auto", "experts", NO_ROOM, True, timeout=TIMEOUT)
    assert short(own[0]) == [("MemoryError", None), STOPPED, STOPPED] and short(others[0]) == [STOPPED] * 3
    assert "MemoryError: no room" in others[0][0][2] and max(own[1], others[1]) < TIMEOUT / 2


def raises_later(ranks: Ranks, peer: int) -> None:
    """Rank 0 raises what a layer raises after a call failed; rank 1 waits for it, or is the one that failed."""
    if ranks.rank == 0:
        raise RankStopped(peer, 0, "MemoryError: no room")
    if peer < 0:
        raise ValueError("of rank 1's own")
    ranks.meet()


@pytest.mark.parametrize("peer, reason", [(0, "MemoryError: no room"), (-1, "ValueError: of rank 1's own")])
def test_all_ranks_learn_what_failed_first(peer: int, reason: str, tmp_path: Path) -> None:
    """Else they would name a rank for its silence, or none."""
    one, other = by_ranks(raises_later, 2, tmp_path, peer, timeout=TIMEOUT)
    named, stopped = (other, 0) if peer == 0 else (one, 1)
    assert (named.kind, named.peer) == ("RankStopped", stopped) and reason in named.text
    assert one.kind == "RankStopped"


SHARED = {"tokens": (group._Tokens, "__init__"), "rows": (group._Rows, "__init__")}


def shared_memory_fails(ranks: Ranks, where: str) -> list[Any]:
    """Two calls over shared memory; rank 0 has no memory for a dispatch or a combine, once all ranks are in it."""
    owner, name = SHARED[where]
    works, failing, said = getattr(owner, name), [NO_ROOM] if ranks.rank == 0 else [], []

    def work(*given: Any) -> None:
        if failing:
            raise failing.pop()
        works(*given)

    setattr(owner, name, work)
    layer = layer_of(ranks.rank, "hierarchical")
    for _ in range(2):
        with pytest.raises((MemoryError, PeerStopped)) as error:
            layer(torch.ones(2, 64), torch.tensor([[0, 2], [1, 3]]).int(), torch.ones(2, 2))
        report = getattr(error.value, "report", None)
        said.append((error.type.__name__, None if report is None else report.peer))
    return said


@pytest.mark.parametrize("where", SHARED)
def test_all_ranks_stop_at_once_where_one_has_no_memory_for_its_messages(where: str, tmp_path: Path) -> None:
    begin, stopped = time.monotonic(), ("PeerStopped", 0)
    own, other = by_ranks(shared_memory_fails, 2, tmp_path, where, timeout=TIMEOUT)
    assert own == [("MemoryError", None), stopped] and other == [stopped] * 2
    assert time.monotonic() - begin < TIMEOUT / 2, "a rank waited for the timeout"


WRONG: dict[str, dict[str, Any]] = {"wire": {"wire": torch.float16}, "timeout": {"timeout": 0}}


def made(ranks: Ranks, where: str) -> str:
    """What making a layer says, where rank 1 fails on its way."""

    def failing(*_: object) -> Any:
        raise OSError("gone") if where != "backend" else BackendUnavailable("no kernels", remedy="install them")

    if ranks.rank == 1 and where == "backend":
        layers.registry.choose = failing
    if ranks.rank == 1 and where == "exchange":
        AllToAll.why_not = failing  # type: ignore[method-assign]
    if ranks.rank == 1 and where == "machine":
        ascend_stand_in.OnCpu.machine = failing  # type: ignore[assignment, method-assign]
    if ranks.rank == 1 and where == "HCCL":
        ascend_stand_in.OnCpu.group_name = failing  # type: ignore[assignment, method-assign]
    mine = WRONG.get(where, {}) if ranks.rank == 1 else {}
    with pytest.raises(ContractError if mine else BackendUnavailable) as error:
        layer_of(ranks.rank, "dispatch_combine" if where in ("machine", "HCCL") else "all_to_all", **mine)
    dist.barrier()  # the ranks are in step
    return str(error.value)


@pytest.mark.parametrize(
    "where, reason",
    [
        ("backend", "no kernels"),
        ("exchange", "gone"),
        ("machine", "gone"),
        ("HCCL", "gone"),
        ("wire", "unsupported wire dtype"),
        ("timeout", "timeout is no time to wait"),
    ],
)
def test_no_rank_waits_for_one_that_cannot_make_its_layer(
    where: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for one whose arguments are refused."""
    monkeypatch.setenv("HCCL_BUFFSIZE", "200")
    begin = time.monotonic()
    one, other = by_ranks(made, 2, tmp_path, where, timeout=TIMEOUT)
    assert "rank 1: " in one and reason in one and reason in other
    assert time.monotonic() - begin < TIMEOUT / 2, "a rank waited for the timeout"


def checked(ranks: Ranks) -> list[str]:
    """What selfcheck leaves out, where one exchange cannot run on rank 1."""
    if ranks.rank == 1:
        AllGather.why_not = lambda problem, topology: "no room"  # type: ignore[assignment, method-assign]
    found = parallel_cases.checks(ReferenceBackend(), "cpu", torch.float32)
    return sorted({check.refused for check in found if "all_gather" in check.name})


def test_all_ranks_check_the_same_exchanges(tmp_path: Path) -> None:
    assert by_ranks(checked, 2, tmp_path, timeout=TIMEOUT) == [["rank 1: no room"]] * 2
