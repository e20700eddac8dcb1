"""The stand-ins of npu_moe_distribute_dispatch_v2 and combine_v2 against their pages, in two processes over gloo."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ascend_stand_in
from ascend_exchange_operators import GROUP

RANKS = 2


def there_and_back(npu: Any, rank: int, x: Tensor, ids: Tensor, weights: Tensor, E: int, most: int) -> dict[str, Any]:
    """Dispatch; expert e multiplies by e + 1; combine. most: tokens of the largest rank."""
    common = {
        "expert_ids": ids,
        "expert_scales": weights,
        "group_ep": GROUP,
        "ep_world_size": RANKS,
        "ep_rank_id": rank,
        "moe_expert_num": E,
        "global_bs": most * RANKS,
        "comm_alg": "fullmesh",
    }
    rows, _, assist, counts, recv, _, scales = npu.npu_moe_distribute_dispatch_v2(x=x, **common)
    sums = npu.npu_moe_distribute_dispatch_v2(x=x, expert_token_nums_type=0, **common)[3]
    expert = torch.repeat_interleave(torch.arange(E // RANKS), counts) + rank * E // RANKS
    expert_out = torch.full_like(rows, float("nan"))
    n = len(expert)
    expert_out[:n] = rows[:n] * (expert[:, None] + 1)
    out = npu.npu_moe_distribute_combine_v2(
        expand_x=expert_out, assist_info_for_combine=assist, ep_send_counts=recv, expand_scales=scales, **common
    )
    assert (sums == counts.cumsum(0)).all() and rows[n:].isnan().all() and counts.dtype == torch.int64
    return {
        "shape": rows.shape,
        "rows": rows[:n],
        "counts": counts.tolist(),
        "recv": recv[:E].tolist(),
        "scales": scales[:n],
        "out": out,
    }


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    npu = ascend_stand_in.npu()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)

    def rows(*values: float, H: int = 32) -> Tensor:
        return torch.tensor(values).bfloat16()[:, None].expand(-1, H).contiguous()

    ids = torch.arange(3, dtype=torch.int32).repeat(8, 1)
    results = {"page": there_and_back(npu, rank, rows(*[1.0] * 8, H=7168), ids, torch.full((8, 3), 0.1), 8, 8)}
    if rank == 0:
        ids, weights, x = torch.tensor([[3, 0], [1, 2]]), torch.tensor([[0.5, 0.25], [1.0, 2.0]]), rows(1, 2)
    else:
        ids, weights, x = torch.tensor([[0, 1]]), torch.tensor([[4.0, 8.0]]), rows(10)
    results["hand"] = there_and_back(npu, rank, x, ids.int(), weights, 4, 2)
    for wrong in ([[1, 1]], [[0, 4]], [[-1, 0]]):
        with pytest.raises(RuntimeError, match="twice in a row|outside 0 .. 3"):
            there_and_back(npu, rank, x[:1], torch.tensor(wrong, dtype=torch.int32), weights[:1], 4, 2)
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort a process that ends by itself


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(process, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


def test_as_in_the_pages_example(results) -> None:
    """CANN's example (ops-transformer, aclnnMoeDistributeDispatchV2.md) on two ranks, without its shared expert.

    Eight tokens of 7168 ones on each rank, each to experts 0, 1 and 2 with weights of 0.1.
    """
    first, second = (rank["page"] for rank in results)
    assert first["shape"] == second["shape"] == (8 * 2 * 3, 7168), "A = global_bs * min(local experts, K)"
    assert first["counts"] == [16, 16, 16, 0] and second["counts"] == [0, 0, 0, 0]
    assert first["recv"] == [8, 16, 24, 32, 40, 48, 48, 48] and second["recv"] == [0] * 8
    assert bool((first["rows"] == 1).all()) and bool((first["scales"] == 0.1).all())
    for rank in (first, second):
        assert rank["out"].shape == (8, 7168) and bool((rank["out"] == torch.tensor(0.6).bfloat16()).all())


def test_by_hand(results) -> None:
    """Rank 0 holds experts 0 and 1 and sends tokens 1 (to 3, 0) and 2 (to 1, 2); rank 1 sends a 10 (to 0, 1)."""
    first, second = (rank["hand"] for rank in results)
    assert first["rows"][:, 0].tolist() == [1, 10, 2, 10] and second["rows"][:, 0].tolist() == [2, 1]
    assert first["scales"].tolist() == [0.25, 4, 1, 8] and second["scales"].tolist() == [2, 0.5]
    assert first["counts"] == [2, 2] and second["counts"] == [1, 1]
    assert first["recv"] == [1, 2, 3, 4] and second["recv"] == [1, 1, 2, 2]
    assert first["out"][:, 31].tolist() == [0.5 * 4 * 1 + 0.25 * 1 * 1, 1.0 * 2 * 2 + 2.0 * 3 * 2]
    assert second["out"][:, 31].tolist() == [4.0 * 1 * 10 + 8.0 * 2 * 10]
