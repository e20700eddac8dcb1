"""The documented limits of the layer's operators on Ascend 910B (Atlas A2): one row each, with the page it stands on.

A row reads shapes, strides, dtypes and numbers of one call's arguments, never a tensor's values. So the backend checks
all rows before the first launch, on meta tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .operators import MATMUL, ROUTE, SWIGLU, UNPERMUTE

# op-plugin's pages: gitcode.com/Ascend/op-plugin, read at commit 517e2f7e of 2026-08-21
PAGES = "docs/zh/custom_APIs/torch_npu/"
# CANN's own: gitcode.com/cann/ops-transformer; op-plugin has no page of the operator
UNPERMUTE_PAGE = "ops-transformer: moe/moe_token_unpermute/docs/aclnnMoeTokenUnpermute.md"

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INNER = 65536

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Limit:
    """One documented rule of one operator.

    Attributes:
        operator: name in torch_npu. page: where the rule stands. rule: what it says.
        holds: whether arguments, by the operator's own names, keep it.
    """

    operator: str
    page: str
    rule: str
    holds: Callable[[Arguments], bool]


def broken(operator: str, arguments: Arguments, table: tuple[Limit, ...] | None = None) -> list[Limit]:
    """The rules that a call would break."""
    rows = (row for row in (table or LIMITS) if row.operator == operator)
    return [row for row in rows if not row.holds(arguments)]


def describe(row: Limit, arguments: Arguments) -> str:
    """What is wrong with a call: the rule, what was got, the page."""
    got = ", ".join(f"{name}={_show(value)}" for name, value in arguments.items())
    return f"{row.operator}: {row.rule}; got {got}; see {row.page}"


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return f"[{_show(value[0])}{', ...' if len(value) > 1 else ''}]"
    return repr(value)


def _page(operator: str) -> str:
    return f"op-plugin: {PAGES}torch_npu-{operator}.md"


def _inner(weight: Tensor) -> int:
    """The size of the axis that is contiguous in memory: a transposed weight's is its second last."""
    return weight.shape[-2] if weight.stride(-1) != 1 and weight.stride(-2) == 1 else weight.shape[-1]


def _bias_fits(a: Arguments) -> bool:
    wanted = torch.float32 if a["x"][0].dtype == torch.bfloat16 else a["x"][0].dtype
    return all(bias.dtype == wanted for bias in a.get("bias") or ())


def _range_fits(a: Arguments) -> bool:
    active = a.get("active_expert_range") or [0, a["expert_num"]]
    return 0 <= active[0] < active[1] <= a["expert_num"]


def _groups(a: Arguments) -> int:
    weight = a["weight"]
    return weight[0].shape[0] if len(weight) == 1 and weight[0].dim() == 3 else len(weight)


_route = _page(ROUTE)
_matmul = _page(MATMUL)
_swiglu = f"op-plugin: {PAGES}（beta）torch_npu-{SWIGLU}.md"

LIMITS: tuple[Limit, ...] = (
    Limit(ROUTE, _route, "x is [tokens, H]", lambda a: a["x"].dim() == 2),
    Limit(ROUTE, _route, "x is fp16, bf16, fp32 or int8", lambda a: a["x"].dtype in (*FLOATS, torch.int8)),
    Limit(ROUTE, _route, "expert_idx is int32", lambda a: a["expert_idx"].dtype == torch.int32),
    Limit(
        ROUTE,
        _route,
        "expert_idx is [tokens, K]",
        lambda a: a["expert_idx"].dim() == 2 and a["expert_idx"].shape[0] == a["x"].shape[0],
    ),
    Limit(
        ROUTE,
        _route,
        "expert_num is 0 to 10240, and to 5120 with expert_tokens_num_type=2",
        lambda a: 0 <= a["expert_num"] <= (5120 if a.get("expert_tokens_num_type") == 2 else 10240),
    ),
    Limit(ROUTE, _route, "active_expert_range lies in 0 .. expert_num", _range_fits),
    Limit(ROUTE, _route, "active_num is -1 or more where no token is dropped", lambda a: a.get("active_num", -1) >= -1),
    Limit(ROUTE, _route, "drop_pad_mode is 0 or 1", lambda a: a.get("drop_pad_mode", 0) in (0, 1)),
    Limit(
        ROUTE, _route, "expert_tokens_num_type is 0, 1 or 2", lambda a: a.get("expert_tokens_num_type", 0) in (0, 1, 2)
    ),
    Limit(ROUTE, _route, "row_idx_type is 0 or 1", lambda a: a.get("row_idx_type", 0) in (0, 1)),
    Limit(
        ROUTE,
        _route,
        "there is no offset without quantisation",
        lambda a: a.get("quant_mode", -1) != -1 or a.get("offset") is None,
    ),
    Limit(MATMUL, _matmul, "x holds at most 128 tensors", lambda a: len(a["x"]) <= 128),
    Limit(MATMUL, _matmul, "weight holds at most 128 tensors", lambda a: len(a["weight"]) <= 128),
    Limit(
        MATMUL,
        _matmul,
        "x and weight have one dtype: bf16, fp16 or fp32",
        lambda a: {t.dtype for t in (*a["x"], *a["weight"])} in [{kind} for kind in FLOATS],
    ),
    Limit(MATMUL, _matmul, "bias is fp32 beside bf16, else in the dtype of x", _bias_fits),
    Limit(MATMUL, _matmul, "x is [rows, inner]", lambda a: all(x.dim() == 2 for x in a["x"])),
    Limit(
        MATMUL,
        _matmul,
        "a lone weight is [groups, inner, N], each of several [inner, N]",
        lambda a: all(w.dim() == (3 if len(a["weight"]) == 1 else 2) for w in a["weight"]),
    ),
    Limit(
        MATMUL,
        _matmul,
        "the inner sizes of x and weight are one",
        lambda a: len({*(x.shape[-1] for x in a["x"]), *(w.shape[-2] for w in a["weight"])}) == 1,
    ),
    Limit(MATMUL, _matmul, "x is not transposed", lambda a: all(x.stride(-1) == 1 for x in a["x"])),
    Limit(
        MATMUL,
        _matmul,
        f"the last axis of x in memory is under {INNER}",
        lambda a: all(_inner(x) < INNER for x in a["x"]),
    ),
    Limit(
        MATMUL,
        _matmul,
        f"the last axis of weight in memory is under {INNER}",
        lambda a: all(_inner(w) < INNER for w in a["weight"]),
    ),
    Limit(MATMUL, _matmul, "split_item is 2 or 3 for one output", lambda a: a.get("split_item", 0) in (2, 3)),
    Limit(MATMUL, _matmul, "group_type is 0 for groups of rows", lambda a: a.get("group_type") == 0),
    Limit(MATMUL, _matmul, "group_list_type is 0 or 1; 2 is for int8", lambda a: a.get("group_list_type", 0) in (0, 1)),
    Limit(MATMUL, _matmul, "group_list is int64", lambda a: a["group_list"].dtype == torch.int64),
    Limit(
        MATMUL,
        _matmul,
        "group_list is [groups]",
        lambda a: a["group_list"].dim() == 1 and a["group_list"].shape[0] == _groups(a),
    ),
    Limit(MATMUL, _matmul, "a weight of three dimensions has at most 1024 groups", lambda a: _groups(a) <= 1024),
    Limit(
        MATMUL,
        _matmul,
        "counts (group_list_type 1) are not of length 1",
        lambda a: a.get("group_list_type", 0) != 1 or a["group_list"].numel() != 1,
    ),
    Limit(
        MATMUL,
        _matmul,
        "act_type is 0: activations are for products quantised per token",
        lambda a: a.get("act_type", 0) == 0,
    ),
    Limit(SWIGLU, _swiglu, "input is fp32, fp16 or bf16", lambda a: a["input"].dtype in FLOATS),
    Limit(SWIGLU, _swiglu, "input has one to eight dimensions", lambda a: 1 <= a["input"].dim() <= 8),
    Limit(SWIGLU, _swiglu, "input is not empty", lambda a: a["input"].numel() > 0),
    Limit(SWIGLU, _swiglu, "input is contiguous", lambda a: a["input"].is_contiguous()),
    Limit(SWIGLU, _swiglu, "dim is one of input's", lambda a: -a["input"].dim() <= a.get("dim", -1) < a["input"].dim()),
    Limit(
        SWIGLU,
        _swiglu,
        "the halved axis is even",
        lambda a: (
            not -a["input"].dim() <= a.get("dim", -1) < a["input"].dim() or a["input"].shape[a.get("dim", -1)] % 2 == 0
        ),
    ),
    Limit(
        UNPERMUTE,
        UNPERMUTE_PAGE,
        "permuted_tokens is bf16, fp16 or fp32",
        lambda a: a["permuted_tokens"].dtype in FLOATS,
    ),
    Limit(UNPERMUTE, UNPERMUTE_PAGE, "permuted_tokens is [tokens * K, H]", lambda a: a["permuted_tokens"].dim() == 2),
    Limit(UNPERMUTE, UNPERMUTE_PAGE, "sorted_indices is int32", lambda a: a["sorted_indices"].dtype == torch.int32),
    Limit(
        UNPERMUTE,
        UNPERMUTE_PAGE,
        "sorted_indices is [tokens * K]",
        lambda a: tuple(a["sorted_indices"].shape) == (a["permuted_tokens"].shape[0],),
    ),
    Limit(UNPERMUTE, UNPERMUTE_PAGE, "probs is bf16, fp16 or fp32", lambda a: a["probs"].dtype in FLOATS),
    Limit(
        UNPERMUTE,
        UNPERMUTE_PAGE,
        "probs is [tokens, K], tokens * K as the rows of permuted_tokens",
        lambda a: a["probs"].dim() == 2 and a["probs"].numel() == a["permuted_tokens"].shape[0],
    ),
    Limit(UNPERMUTE, UNPERMUTE_PAGE, "K is at most 512", lambda a: a["probs"].shape[-1] <= 512),
    Limit(UNPERMUTE, UNPERMUTE_PAGE, "padded_mode is False", lambda a: not a.get("padded_mode", False)),
    Limit(UNPERMUTE, UNPERMUTE_PAGE, "restore_shape is absent", lambda a: a.get("restore_shape") is None),
)
