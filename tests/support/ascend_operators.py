"""CPU implementations of the layer's torch_npu operators, after their pages: slow, plain, and strict.

They refuse what the pages forbid, also what only values show, and fill what the pages leave undefined with NaN or
-2**31, so that nothing can lean on it. Products accumulate in fp32 and round once; SiLU and sums are fp32.

Within `out_of_range_ids` npu_moe_init_routing_v2 takes ids that its page forbids, as CANN 8.5's kernel does
(ops-transformer, moe_init_routing_v3/op_kernel): it sorts them last and counts them nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ttnn_moe.ascend import limits
from ttnn_moe.ascend.operators import FORMAT

UNDEFINED = -(2**31)
NZ, SIDE = 29, 16
_forgiving = False


@contextmanager
def out_of_range_ids() -> Iterator[None]:
    """See the module's docstring. Rows may then be named twice; a row that is not there is refused as before."""
    global _forgiving
    _forgiving = True
    try:
        yield
    finally:
        _forgiving = False


def refuse(operator: str, given: Mapping[str, object], table: tuple[limits.Limit, ...] | None = None) -> None:
    """Raise RuntimeError for the first documented limit that a call breaks.

    Args:
        given: the call's arguments by the operator's own names. table: the limits; None: those of the layer.
    """
    arguments = {name: value for name, value in given.items() if name != "others"}
    for row in limits.broken(operator, arguments, table):
        raise RuntimeError(limits.describe(row, arguments))


def init_routing(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """npu_moe_init_routing_v2 without quantisation and without dropping."""
    refuse(limits.ROUTE, locals() | {"active_expert_range": list(active_expert_range)})
    if drop_pad_mode or quant_mode != -1 or expert_tokens_num_type == 2:
        raise NotImplementedError("the stand-in neither drops nor quantises")
    start, end = active_expert_range or (0, expert_num)
    ids = expert_idx.flatten()
    if bool(((ids < 0) | (ids >= expert_num)).any()) and not _forgiving:
        raise RuntimeError(f"expert_idx holds ids outside 0 .. {expert_num - 1}")
    active = (ids >= start) & (ids < end)
    # inactive pairs go last
    order = torch.sort(torch.where(active, ids, 2**31 - 1), stable=True).indices
    n = int(active.sum())
    total, K = ids.numel(), expert_idx.shape[1]
    length = total if active_num <= 0 else min(active_num, total)
    rows = torch.full((length, x.shape[1]), float("nan")).to(x.dtype)
    filled = min(length, n)
    rows[:filled] = x[order[:filled] // K]
    if row_idx_type == 0:
        index = torch.full((total,), -1, dtype=torch.int32)
        index[order[:n]] = torch.arange(n, dtype=torch.int32)
    else:
        index = torch.full((total,), UNDEFINED, dtype=torch.int32)
        index[:n] = order[:n].int()
    counts = torch.bincount(ids[active] - start, minlength=end - start) if expert_tokens_num_flag else torch.empty(0)
    if expert_tokens_num_type == 0:
        counts = counts.cumsum(0)
    weights = torch.full((x.shape[0] * K,), float("nan"))
    if scale is not None:
        weights[:n] = scale[order[:n] // K]
    return rows, index, counts.long(), weights


def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    act_type: int = 0,
    **others: object,
) -> list[Tensor]:
    """npu_grouped_matmul without quantisation: groups of rows, or lists of separate products."""
    arguments = dict(locals())
    if given := {name: value for name, value in others.items() if value is not None}:
        raise NotImplementedError(f"the stand-in has no {sorted(given)}")
    if group_type == -1:
        biases = bias or [None] * len(x)
        return [_product(a, w, b) for a, w, b in zip(x, weight, biases, strict=True)]
    refuse(limits.MATMUL, arguments)
    assert group_list is not None
    ends = group_list if group_list_type == 0 else group_list.cumsum(0)
    bounds = [0, *ends.tolist()]
    if bounds != sorted(bounds) or bounds[-1] > len(x[0]):
        raise RuntimeError(f"groups end at {bounds[1:]}, and x has {len(x[0])} rows")
    weight = [_plain(one) for one in weight]
    groups = list(weight[0]) if len(weight) == 1 else weight
    # rows past the last group are not written
    out = x[0].new_full((len(x[0]), groups[0].shape[1]), float("nan"))
    for i, w in enumerate(groups):
        out[bounds[i] : bounds[i + 1]] = _product(x[0][bounds[i] : bounds[i + 1]], w, bias[i] if bias else None)
    return [out]


def format_cast(
    input: Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """npu_format_cast from ND to FRACTAL_NZ: blocks of 16 x 16 values, row-major within a block, columns of blocks.

    The result has the shape of the input, and its own order in memory: only `grouped_matmul` can read it.
    """
    rows, columns = input.shape[-2:]
    if acl_format != NZ or not input.is_contiguous() or input.dtype == torch.float32 or rows % SIDE or columns % SIDE:
        raise RuntimeError(f"the stand-in casts no {input.dtype} {list(input.shape)} to format {acl_format}")
    blocks = input.unflatten(-1, (-1, SIDE)).unflatten(-3, (-1, SIDE)).movedim(-2, -4)
    out = blocks.contiguous().view(input.shape)
    out.acl_format = acl_format  # type: ignore[attr-defined]
    return out


def _plain(weight: Tensor) -> Tensor:
    """A weight in ND, whatever its format."""
    if getattr(weight, "acl_format", 2) != NZ:
        return weight
    rows, columns = weight.shape[-2:]
    blocks = weight.view(*weight.shape[:-2], columns // SIDE, rows // SIDE, SIDE, SIDE)
    return blocks.movedim(-4, -2).reshape(weight.shape)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x.float() @ weight.float()
    return (product if bias is None else product + bias.float()).to(x.dtype)


def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """npu_swiglu: swish of the first half times the second."""
    refuse(limits.SWIGLU, locals())
    gate, up = input.float().chunk(2, dim)
    return (gate * torch.sigmoid(gate) * up).to(input.dtype)


def token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """npu_moe_token_unpermute: out[t] = sum over ascending k of permuted_tokens[sorted_indices[t * K + k]] * probs."""
    if probs is None:
        probs = torch.ones(len(permuted_tokens), 1)
    refuse(limits.UNPERMUTE, locals())
    if bool(((sorted_indices < 0) | (sorted_indices >= len(permuted_tokens))).any()):
        raise RuntimeError("sorted_indices names a row that is not there")
    if len(sorted_indices.unique()) < len(permuted_tokens) and not _forgiving:
        raise RuntimeError("sorted_indices does not name each row once")
    T, K = probs.shape
    total = torch.zeros(T, permuted_tokens.shape[1])
    index = sorted_indices.long().view(T, K)
    for k in range(K):
        total += permuted_tokens[index[:, k]].float() * probs[:, k, None].float()
    return total.to(permuted_tokens.dtype)


IMPLEMENTATIONS = {
    limits.ROUTE: init_routing,
    limits.MATMUL: grouped_matmul,
    limits.SWIGLU: swiglu,
    limits.UNPERMUTE: token_unpermute,
    FORMAT: format_cast,
}
