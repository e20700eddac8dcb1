"""Expert parallelism in two and four processes over gloo: both exchanges against one process with all experts."""

from __future__ import annotations

import os
from pathlib import Path

import ascend_stand_in
import pytest
import torch
import torch.distributed as dist

from ttnn_moe import Experts, Placement, Problem, Routing, moe, registry
from ttnn_moe.errors import BackendUnavailable, ContractError
from ttnn_moe.parallel import ExpertParallel
from ttnn_moe.parallel.exchange import AllToAll

E, K, H, I, MOST = 8, 3, 64, 32, 16
# what each rank has: the last ends with tokens that name no expert, and some names come twice
TOKENS = {2: (16, 0), 4: (5, 16, 0, 1)}
EXCHANGES = ("all_to_all", "dispatch_combine")


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


def process(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["HCCL_BUFFSIZE"] = "200"
    registry.register("ascend", ascend_stand_in.TARGET)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    placement, experts = placement_of(size, rank), experts_of_all()
    problem = Problem(MOST, E, K, H, I, torch.bfloat16, torch.float32, D=size)
    hidden, ids, weights = inputs(rank, TOKENS[size][rank])
    results: dict[str, object] = {}
    for exchange in EXCHANGES:
        backend = "ascend" if exchange == "dispatch_combine" else "reference"
        layer = ExpertParallel(problem, experts.for_device(placement), placement, None, backend, exchange)
        results[exchange] = layer(hidden, ids, weights)
        again = layer(hidden, ids, weights)
        results[f"{exchange}: same"] = torch.equal(results[exchange].view(torch.int32), again.view(torch.int32))  # type: ignore[attr-defined]
    wire = ExpertParallel(
        problem, experts.for_device(placement), placement, None, "reference", "all_to_all", torch.bfloat16
    )
    start = torch.ones(len(hidden), H)
    results["bf16 wire, added"] = wire(hidden, ids, weights, out=start, accumulate=True)
    results["auto"] = [
        ExpertParallel(problem, experts.for_device(placement), placement, None, backend).exchange.name
        for backend in ("ascend", "reference")
    ]
    try:
        AllToAll(Placement(placement.device_expert_mapping, (rank + 1) % size))
    except ContractError as error:
        results["wrong rank"] = str(error)
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort a process that ends by itself


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes(size: int, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(process, (size, str(tmp_path)), nprocs=size)
    experts = experts_of_all()
    for rank, tokens in enumerate(TOKENS[size]):
        hidden, ids, weights = inputs(rank, tokens)
        results = torch.load(tmp_path / f"rank{rank}.pt")
        want = torch.empty(tokens, H)
        moe(hidden, Routing.from_topk(ids, weights, E), experts, out=want, backend="reference")
        good = want.isfinite().all(1)
        assert int((~good).sum()) == (1 if tokens > 3 else 0)
        for exchange, bound in (("all_to_all", 1e-6), ("dispatch_combine", 1e-2), ("bf16 wire, added", 1e-2)):
            got = results[exchange] - (1 if "added" in exchange else 0)
            assert got.shape == want.shape
            assert torch.equal(got.isfinite().all(1), good), f"{exchange}: NaN or infinity went to another token"
            size_of = want[good].norm(dim=1).clamp_min(0.05)
            assert bool(((got - want)[good].norm(dim=1) / size_of < bound).all()), exchange
            if tokens > 3:
                assert bool((got[2] == 0).all()), "a token that names no expert"
        assert results["all_to_all: same"] and results["dispatch_combine: same"]
        assert results["auto"] == ["dispatch_combine", "all_to_all"]
        assert "not that of this process group" in results["wrong rank"]


def test_what_does_not_fit_is_refused() -> None:
    placement, experts = placement_of(2, 0), experts_of_all()
    problem = Problem(MOST, E, K, H, I, torch.bfloat16, D=2)
    with pytest.raises(ContractError, match="do not fit together"):
        ExpertParallel(problem, experts, placement)
    local = experts.for_device(placement)
    with pytest.raises(ContractError, match="unknown exchange"):
        ExpertParallel(problem, local, placement, exchange="pigeon")
    with pytest.raises(ContractError, match="wire"):
        ExpertParallel(problem, local, placement, wire=torch.float16)
    with pytest.raises(BackendUnavailable, match="no exchange of its own"):
        ExpertParallel(problem, local, placement, backend="reference", exchange="dispatch_combine")
