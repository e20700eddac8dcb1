"""Expert parallelism in two and four processes over gloo: each exchange against one process with all experts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ascend_stand_in
from host_waits import HostWaits
from ttnn_moe import Experts, Placement, Problem, Routing, moe, registry
from ttnn_moe.ascend import run
from ttnn_moe.errors import BackendUnavailable, ContractError
from ttnn_moe.parallel import ExpertParallel
from ttnn_moe.parallel.exchanges import AllGather, Topology, agreement, hierarchical
from ttnn_moe.parallel.exchanges.all_to_all import AllToAll
from ttnn_moe.parallel.exchanges.first_call import ExchangeWarning, FirstCall
from ttnn_moe.parallel.exchanges.peer_memory import PeerMemoryExchange
from ttnn_moe.parallel.hierarchical import Nodes, tree_sum
from ttnn_moe.reference import ReferenceBackend

E, K, H, I, MOST = 8, 3, 64, 32, 16
# what each rank has: the last ends with tokens that name no expert, and some names come twice
TOKENS = {2: (16, 0), 4: (5, 16, 0, 1)}
EXCHANGES = ("all_to_all", "all_gather", "dispatch_combine", "hierarchical")
# what waits for the device in a call, by the exchange: the host reads the sizes of all_to_all's messages
WAITS = {"all_to_all": ["tolist"], "all_gather": [], "dispatch_combine": []}


def inputs(rank: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(100 + rank)
    ids = torch.randint(-1, E + 1, (tokens, K), generator=g, dtype=torch.int32)  # -1 and E are no expert
    hidden = torch.randn(tokens, H, generator=g).bfloat16()
    if tokens > 3:
        ids[0], ids[1], ids[2] = torch.tensor([4, 1, 4]), 7, -1
        hidden[2, 0] = float("nan")  # in a token that has no expert: its output is zero
        hidden[3, 0], ids[3, 0] = float("inf"), 5  # in one that has: it stays there
    return hidden, ids, torch.rand(tokens, K, generator=g)


def experts_of_all() -> Experts:
    g = torch.Generator().manual_seed(9)
    gate_up = (torch.randn(E, 2 * I, H, generator=g) * H**-0.5).bfloat16()
    return Experts.dense(gate_up, (torch.randn(E, H, I, generator=g) * I**-0.5).bfloat16())


def placement_of(size: int, rank: int | None = None) -> Placement:
    """Not contiguous: experts are dealt out, in descending order on odd devices."""
    rows = [list(range(d, E, size))[:: -1 if d % 2 else 1] for d in range(size)]
    return Placement.from_mapping(rows, rank)


def true_tokens(rank: int, tokens: int) -> int:
    """num_tokens of a call whose T is only a bound."""
    return max(tokens - 3 - rank, 0)


def bounded(layer: ExpertParallel, rank: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor):
    """A call with num_tokens: NaN in the rows past it, and an out of nines that they must leave alone."""
    n = true_tokens(rank, len(hidden))
    hidden, weights, ids = hidden.clone(), weights.clone(), ids.clone()
    hidden[n:], weights[n:], ids[n:] = float("nan"), float("nan"), 0
    out = torch.full((len(hidden), H), 9.0)
    return layer(hidden, ids, weights, out=out, num_tokens=torch.tensor([n], dtype=torch.int32))


def first_call(rank: int, placement: Placement, experts: Experts, *inputs: torch.Tensor) -> tuple[object, ...]:
    """What "auto" would make where the preferred exchange fails on the last rank only, at its first call."""

    class Fails(AllToAll):
        name = "fails"
        calls = 0

        def __call__(self, *arguments):
            Fails.calls += 1
            if rank == placement.D - 1:
                raise RuntimeError("CANN has no such operator")
            return inputs[0]

    exchange = FirstCall([lambda kind=kind: kind(placement, backend="reference") for kind in (Fails, AllToAll)], None)
    routing, local = Routing.from_topk(*inputs[1:], E), experts.for_device(placement)
    with pytest.warns(ExchangeWarning) as warned:
        first, again = (exchange(inputs[0], routing, local) for _ in range(2))
    return first, again, exchange.name, Fails.calls, [str(one.message) for one in warned]


def process(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["HCCL_BUFFSIZE"] = "200"
    if rank == 0:  # set on one rank only: all must still make the same calls
        os.environ["HCCL_DETERMINISTIC"] = "true"
    registry.register("ascend", ascend_stand_in.TARGET)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    placement, experts = placement_of(size, rank), experts_of_all()
    problem = Problem(MOST, E, K, H, I, torch.bfloat16, torch.float32, D=size)
    hidden, ids, weights = inputs(rank, TOKENS[size][rank])

    def layer_of(problem: Problem, backend: str = "reference", exchange: str = "auto") -> ExpertParallel:
        nodes = Nodes(2, size // 2) if exchange == "hierarchical" else None
        return ExpertParallel(problem, experts.for_device(placement), placement, None, backend, exchange, nodes=nodes)

    results: dict[str, object] = {}
    products: list[tuple[int, int]] = []
    grouped_matmul = run.grouped_matmul

    def spy(npu, rows, weight, counts):
        products.append((int(counts.sum()), len(rows)))
        return grouped_matmul(npu, rows, weight, counts)

    for exchange in EXCHANGES:
        layer = layer_of(problem, "ascend" if exchange == "dispatch_combine" else "reference", exchange)
        if exchange == "hierarchical":
            combine = layer.exchange.transport.group.combine  # type: ignore[attr-defined]

            def seen(rows, meta, *, combine=combine, **options):
                results.setdefault("rows", rows)
                results.setdefault("masks", meta.masks)
                return combine(rows, meta, **options)

            layer.exchange.transport.group.combine = seen  # type: ignore[attr-defined]
        run.grouped_matmul = spy
        results[exchange] = layer(hidden, ids, weights)
        run.grouped_matmul = grouped_matmul
        again = layer(hidden, ids, weights)
        if exchange in WAITS:
            on_npu = layer_of(problem, "ascend", exchange)
            on_npu(hidden, ids, weights)
            with HostWaits() as waits:
                on_npu(hidden, ids, weights)
            results[f"{exchange}: waits"] = waits.names
        run.grouped_matmul = spy
        results[f"{exchange}: bounded"] = bounded(layer, rank, hidden, ids, weights)
        run.grouped_matmul = grouped_matmul
        results[f"{exchange}: same"] = torch.equal(results[exchange].view(torch.int32), again.view(torch.int32))  # type: ignore[attr-defined]
    for exchange in ("all_to_all", "all_gather"):
        wire = ExpertParallel(
            problem, experts.for_device(placement), placement, None, "reference", exchange, torch.bfloat16
        )
        start = torch.ones(len(hidden), H)
        results[f"{exchange}: bf16 wire, added"] = wire(hidden, ids, weights, out=start, accumulate=True)
    results["first call"] = first_call(rank, placement, experts, hidden, ids, weights)
    results["auto"] = [layer_of(problem, backend).exchange.name for backend in ("ascend", "reference")]
    results["products"], results["bounded products"] = products[0], products[2]
    wrong = Placement(placement.device_expert_mapping, (rank + 1) % size)
    own = placement if rank else Placement.uniform(E, size, rank)
    local, first = experts.for_device(placement), rank == 0

    def hierarchical(**options: Any) -> ExpertParallel:
        return ExpertParallel(problem, local, placement, backend="reference", exchange="hierarchical", **options)

    for name, change in (
        ("wrong rank", lambda: ExpertParallel(problem, experts.for_device(wrong), wrong)),
        ("placement differs", lambda: ExpertParallel(problem, local, own, backend="reference")),
        ("nodes differs", lambda: hierarchical(nodes=Nodes(3, 1) if first else None)),
        ("timeout differs", lambda: hierarchical(timeout=2.0 if first else 30.0)),
        ("T differs", lambda: layer_of(replace(problem, T=MOST + rank))),
        ("global_bs differs", lambda: layer_of(replace(problem, T=MOST + 1), "ascend", "dispatch_combine")),
    ):
        with pytest.raises((ContractError, BackendUnavailable)) as error:
            change()
        results[name] = str(error.value)
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort a process that ends by itself


def bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.int32)


def summed(rank: int, loaded: list[dict[str, Any]]) -> torch.Tensor:
    """tree_sum of what each rank's experts made of this rank's tokens."""
    size, masks = len(loaded), loaded[0]["masks"]
    rows = torch.zeros(size, len(masks[rank]), H)
    for other in range(size):
        here = [mask >> other & 1 == 1 for mask in masks]
        rows[other, here[rank]] = loaded[other]["rows"].split([int(one.sum()) for one in here])[rank]
    return tree_sum(rows, masks[rank], Nodes(2, size // 2), rank, torch.float32)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes(size: int, tmp_path: Path) -> None:
    # a start without imports takes milliseconds
    torch.multiprocessing.start_processes(process, (size, str(tmp_path)), nprocs=size, start_method="fork")
    experts = experts_of_all()
    loaded = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(size)]
    # every pair is one row somewhere, a rank without a token sends one, and no other row is multiplied
    assert sum(rank["products"][0] for rank in loaded) == sum(max(n, 1) * K for n in TOKENS[size])
    assert all(rank["products"][1] == MOST * size * min(E // size, K) for rank in loaded)
    # dispatch_combine's rows past num_tokens travel, too, with weight zero
    bounded_rows = sum(rank["bounded products"][0] for rank in loaded)
    assert bounded_rows == sum(max(n, 1) * K for n in TOKENS[size])
    for rank, tokens in enumerate(TOKENS[size]):
        hidden, ids, weights = inputs(rank, tokens)
        results = loaded[rank]
        want = torch.empty(tokens, H)
        moe(hidden, Routing.from_topk(ids, weights, E), experts, out=want, backend="reference")
        good = want.isfinite().all(1)
        assert int((~good).sum()) == (1 if tokens > 3 else 0)
        bounds = {"all_to_all": 1e-6, "all_gather": 1e-6, "hierarchical": 1e-6, "dispatch_combine": 1e-2}
        bounds |= {f"{exchange}: bf16 wire, added": 1e-2 for exchange in ("all_to_all", "all_gather")}
        for exchange, bound in bounds.items():
            got = results[exchange] - (1 if "added" in exchange else 0)
            assert got.shape == want.shape
            assert torch.equal(got.isfinite().all(1), good), f"{exchange}: NaN or infinity went to another token"
            size_of = want[good].norm(dim=1).clamp_min(0.05)
            assert bool(((got - want)[good].norm(dim=1) / size_of < bound).all()), exchange
            if tokens > 3:
                assert bool((got[2] == 0).all()), "a token that names no expert"
        n = true_tokens(rank, tokens)
        for exchange in EXCHANGES:
            got = results[f"{exchange}: bounded"]
            torch.testing.assert_close(got[:n], results[exchange][:n], rtol=1e-5, atol=1e-6, equal_nan=True)
            assert bool((got[n:] == 9).all()), "rows past num_tokens were written"
            assert results[f"{exchange}: same"] and results.get(f"{exchange}: waits") == WAITS.get(exchange)
        assert torch.equal(bits(results["hierarchical"]), bits(summed(rank, loaded)))
        assert results["auto"] == ["all_gather", "all_to_all"]
        assert "not that of this process group" in results["wrong rank"]
        for field in ("placement", "nodes", "timeout"):
            assert f": {field}: got" in results[f"{field} differs"]
        for text in (f"rank 1: problem: got T={MOST + 1},", f"expected T={MOST},"):
            assert text in results["T differs"]
        assert f"the first took {MOST * size}, and T={MOST + 1}" in results["global_bs differs"]
        first, again, name, calls, lines = results["first call"]
        assert (name, calls) == ("all_to_all", 1) and torch.equal(first.isfinite(), again.isfinite())
        torch.testing.assert_close(first, want, rtol=1e-5, atol=1e-6, equal_nan=True)
        reason = "CANN has no such operator" if rank == size - 1 else "on another process"
        assert lines == [f"exchange fails failed at its first call ({reason}); all_to_all takes its place"]


def in_halves(rank: int, folder: str) -> None:
    """Ranks 0 and 2 share the experts, and ranks 1 and 3. The two groups make other layers, in another order."""
    torch.set_num_threads(1)
    registry.register("ascend", ascend_stand_in.TARGET)
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4, timeout=limit)
    group = [dist.new_group([half, half + 2], limit) for half in range(2)][rank % 2]
    placement, experts = placement_of(2, rank // 2), experts_of_all()
    problem = Problem(MOST, E, K, H, I, torch.bfloat16, torch.float32, D=2)
    hidden, ids, weights = inputs(rank, MOST - 4 * rank)
    want = torch.empty(len(hidden), H)
    moe(hidden, Routing.from_topk(ids, weights, E), experts, out=want, backend="reference")
    ways = [("reference", name) for name in ("all_to_all", "all_gather", "hierarchical")]
    for backend, exchange in [("ascend", "auto"), *ways[::-1]] if rank % 2 else ways:
        layer = ExpertParallel(problem, experts.for_device(placement), placement, group, backend, exchange)
        got, bound = layer(hidden, ids, weights), 1e-2 if backend == "ascend" else 1e-5
        torch.testing.assert_close(got, want, rtol=bound, atol=bound, equal_nan=True)
    Path(folder, f"rank{rank}").touch()
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort a process that ends by itself


def test_two_groups_of_one_world(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(in_halves, (str(tmp_path),), nprocs=4, start_method="fork")
    assert len(list(tmp_path.glob("rank*"))) == 4


@pytest.fixture
def alone(tmp_path: Path):
    """A process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield placement_of(1, 0)
    dist.destroy_process_group()


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


ALONE = Problem(MOST, E, K, H, I, torch.bfloat16)


def test_without_a_process_group() -> None:
    with pytest.raises(ContractError, match="torch.distributed is not started.*init_process_group"):
        ExpertParallel(ALONE, experts_of_all(), placement_of(1, 0))


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


def test_one_process_is_the_whole_layer(alone: Placement) -> None:
    hidden, ids, weights = inputs(0, MOST)
    layer = ExpertParallel(ALONE, experts_of_all(), alone, backend="reference")
    want = moe(hidden, Routing.from_topk(ids, weights, E), experts_of_all(), backend="reference")
    torch.testing.assert_close(layer(hidden, ids, weights), want, equal_nan=True)


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
        exchange.into(hidden, routing, experts_of_all(), torch.empty_like(hidden), False)
