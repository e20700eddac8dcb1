"""Expert parallelism in two and four processes over gloo: each exchange against one process with all experts."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ascend_stand_in
from host_waits import HostWaits
from parallel_layers import EXCHANGES, MOST, TOKENS, E, H, I, K, experts_of_all, inputs, placement_of
from ttnn_moe import Experts, Placement, Problem, Routing, moe, registry
from ttnn_moe.ascend import run
from ttnn_moe.errors import BackendUnavailable, ContractError
from ttnn_moe.parallel import ExpertParallel
from ttnn_moe.parallel.exchanges.all_to_all import AllToAll
from ttnn_moe.parallel.exchanges.first_call import ExchangeWarning, FirstCall
from ttnn_moe.parallel.hierarchical import Nodes, tree_sum

# what waits for the device in a call, by the exchange: the host reads the sizes of all_to_all's messages
WAITS = {"all_to_all": ["tolist"], "all_gather": [], "dispatch_combine": []}


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
