"""CPU implementations of npu_moe_distribute_dispatch_v2 and combine_v2 after their pages, over gloo.

As strict as those of ascend_operators.py: what the pages forbid is refused, what they leave undefined is NaN or
-2**31. assist_info_for_combine holds the source rank and the pair of each row, in a form of this file's own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ascend_operators import UNDEFINED, refuse
from ttnn_moe.ascend.operators import COMBINE, DISPATCH
from ttnn_moe.parallel.exchanges.npu_limits import RELEASES, limits_of, rows_received

LIMITS = limits_of(RELEASES[-1])
GROUP = "gloo-in-place-of-hccl"


def _check_ids(ids: Tensor, E: int) -> None:
    if bool(((ids < 0) | (ids >= E)).any()):
        raise RuntimeError(f"expert_ids holds ids outside 0 .. {E - 1}")
    ordered = ids.sort(1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise RuntimeError("expert_ids names an expert twice in a row")


def _move(tensor: Tensor, to: list[int], of: list[int]) -> Tensor:
    out = tensor.new_empty(sum(of), *tensor.shape[1:])
    dist.all_to_all_single(out, tensor.contiguous(), of, to)
    return out


def dispatch(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    expert_scales: Tensor | None = None,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    comm_alg: str = "",
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    **others: object,
) -> tuple[Tensor, ...]:
    """Rows of each local expert, by source rank, then by pair; [A, H], the rest undefined."""
    refuse(DISPATCH, locals(), LIMITS)
    assert group_ep == GROUP and ep_world_size == dist.get_world_size() and ep_rank_id == dist.get_rank()
    assert expert_scales is not None and quant_mode == 0
    _check_ids(expert_ids, moe_expert_num)
    D, E_local, K = ep_world_size, moe_expert_num // ep_world_size, expert_ids.shape[1]
    ids = expert_ids.flatten().long()
    order = ids.sort(stable=True).indices
    sent = torch.bincount(ids // E_local, minlength=D)
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent)
    to, of = sent.tolist(), came.tolist()
    rows = _move(x[order // K], to, of)
    marks = _move(torch.stack([ids[order], order], 1), to, of)
    weights = _move(expert_scales.flatten()[order], to, of)
    source = torch.repeat_interleave(torch.arange(D), came)
    by_expert = (marks[:, 0] % E_local).sort(stable=True).indices
    tokens = global_bs // D or len(x)
    A, n = rows_received(tokens, D, moe_expert_num, K), len(rows)
    expand_x = torch.full((A, x.shape[1]), float("nan")).to(x.dtype)
    expand_x[:n] = rows[by_expert]
    assist = torch.full((A, 128), UNDEFINED, dtype=torch.int32)
    assist[:n, 0], assist[:n, 1] = source[by_expert].int(), marks[by_expert, 1].int()
    scales = torch.full((A,), float("nan"))
    scales[:n] = weights[by_expert]
    # of each expert from each rank; then room for what combine reduces between servers
    by_source = torch.bincount(marks[:, 0] % E_local * D + source, minlength=moe_expert_num)
    recv = torch.full((moe_expert_num + 2 * tokens * D * K * max(D // 8, 1),), UNDEFINED, dtype=torch.int32)
    recv[:moe_expert_num] = by_source.cumsum(0)
    counts = by_source.view(E_local, D).sum(1)
    counts = counts.cumsum(0) if expert_token_nums_type == 0 else counts
    return expand_x, torch.empty(0), assist.flatten(), counts, recv, torch.empty(0, dtype=torch.int32), scales


def combine(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    expand_scales: Tensor | None = None,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    comm_alg: str = "",
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    **others: object,
) -> Tensor:
    """Each token's rows times its weights, summed in fp32 over ascending k."""
    refuse(COMBINE, locals(), LIMITS)
    D, n = ep_world_size, int(ep_send_counts[moe_expert_num - 1])
    assist = assist_info_for_combine.view(-1, 128)[:n]
    back = assist[:, 0].sort(stable=True).indices
    sent = torch.bincount(assist[:, 0], minlength=D)
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent)
    to, of = sent.tolist(), came.tolist()
    rows = _move(expand_x[:n][back], to, of)
    pairs = _move(assist[back, 1].contiguous(), to, of).long()
    T, K = expert_ids.shape
    assert torch.equal(pairs.sort().values, torch.arange(T * K)), "each pair comes back once"
    of_pair = torch.empty(T * K, rows.shape[1])
    of_pair[pairs] = rows.float()
    total = torch.zeros(T, rows.shape[1])
    for k in range(K):
        total += of_pair.view(T, K, -1)[:, k] * expert_scales[:, k, None]
    return total.to(expand_x.dtype)


IMPLEMENTATIONS = {DISPATCH: dispatch, COMBINE: combine}
