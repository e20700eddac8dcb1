"""The documented limits, one call that breaks each; and that no other rule is what refuses it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from ttnn_moe import Experts, Problem, Routing, registry
from ttnn_moe.ascend import limits
from ttnn_moe.ascend.backend import AscendBackend
from ttnn_moe.ascend.operators import LAYER, MATMUL, ROUTE, SWIGLU, UNPERMUTE
from ttnn_moe.ascend.run import calls

BF16 = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def good(operator: str) -> dict[str, Any]:
    """A call of the layer at Qwen3-30B-A3B's sizes."""
    return next(dict(a) for name, a in calls(37, 128, 8, 2048, 768, BF16, False, False) if name == operator)


# rule -> what makes the good call break it, and it alone
BREAKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "x is [tokens, H]": lambda a: a.update(x=empty(37, 2, 1024)),
    "x is fp16, bf16, fp32 or int8": lambda a: a.update(x=empty(37, 2048, dtype=torch.float64)),
    "expert_idx is int32": lambda a: a.update(expert_idx=empty(37, 8, dtype=torch.int64)),
    "expert_idx is [tokens, K]": lambda a: a.update(expert_idx=empty(36, 8, dtype=torch.int32)),
    "expert_num is 0 to 10240": lambda a: a.update(expert_num=10241),
    "active_expert_range lies in": lambda a: a.update(active_expert_range=[0, 130]),
    "active_num is -1 or more": lambda a: a.update(active_num=-2),
    "drop_pad_mode is 0 or 1": lambda a: a.update(drop_pad_mode=2),
    "expert_tokens_num_type is 0, 1 or 2": lambda a: a.update(expert_tokens_num_type=3),
    "row_idx_type is 0 or 1": lambda a: a.update(row_idx_type=2),
    "there is no offset": lambda a: a.update(offset=empty(1, dtype=torch.float32)),
    "x holds at most 128": lambda a: a.update(x=a["x"] * 129),
    "weight holds at most 128": lambda a: a.update(
        weight=[empty(2048, 1536)] * 129, group_list=empty(129, dtype=torch.int64)
    ),
    "x and weight have one dtype": lambda a: a.update(x=[empty(296, 2048, dtype=torch.float16)]),
    "bias is fp32 beside bf16": lambda a: a.update(bias=[empty(1536)]),
    "x is [rows, inner]": lambda a: a.update(x=[empty(37, 8, 2048)]),
    "a lone weight is [groups": lambda a: a.update(
        weight=[empty(2048, 1536)], group_list=empty(1, dtype=torch.int64), group_list_type=0
    ),
    "the inner sizes of x and weight": lambda a: a.update(x=[empty(296, 2080)]),
    "x is not transposed": lambda a: a.update(x=[empty(2048, 296).t()]),
    "the last axis of x in memory": lambda a: a.update(x=[empty(296, 65536)], weight=[empty(128, 65536, 1536)]),
    "the last axis of weight in memory": lambda a: a.update(weight=[empty(128, 2048, 65536)]),
    "split_item is 2 or 3": lambda a: a.update(split_item=0),
    "group_type is 0": lambda a: a.update(group_type=2),
    "group_list_type is 0 or 1": lambda a: a.update(group_list_type=2),
    "group_list is int64": lambda a: a.update(group_list=empty(128, dtype=torch.int32)),
    "group_list is [groups]": lambda a: a.update(group_list=empty(127, dtype=torch.int64)),
    "a weight of three dimensions has at most 1024": lambda a: a.update(
        weight=[empty(1025, 2048, 1536)], group_list=empty(1025, dtype=torch.int64)
    ),
    "counts (group_list_type 1) are not": lambda a: a.update(
        weight=[empty(1, 2048, 1536)], group_list=empty(1, dtype=torch.int64), group_list_type=1
    ),
    "act_type is 0": lambda a: a.update(act_type=5),
    "input is fp32, fp16 or bf16": lambda a: a.update(input=empty(296, 1536, dtype=torch.float64)),
    "input has one to eight": lambda a: a.update(input=empty(1, 1, 1, 1, 1, 1, 1, 296, 1536)),
    "input is not empty": lambda a: a.update(input=empty(0, 1536)),
    "input is contiguous": lambda a: a.update(input=empty(296, 1537)[:, 1:]),
    "dim is one of input's": lambda a: a.update(dim=2),
    "the halved axis is even": lambda a: a.update(input=empty(296, 1535)),
    "permuted_tokens is bf16": lambda a: a.update(permuted_tokens=empty(296, 2048, dtype=torch.float64)),
    "permuted_tokens is [tokens * K, H]": lambda a: a.update(permuted_tokens=empty(296, 2, 1024)),
    "sorted_indices is int32": lambda a: a.update(sorted_indices=empty(296, dtype=torch.int64)),
    "sorted_indices is [tokens * K]": lambda a: a.update(sorted_indices=empty(295, dtype=torch.int32)),
    "probs is bf16, fp16 or fp32": lambda a: a.update(probs=empty(37, 8, dtype=torch.float64)),
    "probs is [tokens, K]": lambda a: a.update(probs=empty(36, 8)),
    "K is at most 512": lambda a: a.update(
        permuted_tokens=empty(513, 2048), sorted_indices=empty(513, dtype=torch.int32), probs=empty(1, 513)
    ),
    "padded_mode is False": lambda a: a.update(padded_mode=True),
    "restore_shape is absent": lambda a: a.update(restore_shape=[37, 2048]),
}


def test_the_layer_at_full_size_keeps_every_limit() -> None:
    for T in (1, 37, 4096):
        for wide, distinct in product((False, True), repeat=2):
            for operator, arguments in calls(T, 128, 8, 2048, 768, BF16, wide, distinct):
                assert limits.broken(operator, arguments) == []


@pytest.mark.parametrize("row", limits.LIMITS, ids=lambda row: f"{row.operator}: {row.rule}")
def test_each_limit_refuses_what_breaks_it(row: limits.Limit) -> None:
    (change,) = [change for start, change in BREAKS.items() if row.rule.startswith(start)]
    arguments = good(row.operator)
    change(arguments)
    assert limits.broken(row.operator, arguments) == [row]
    text = limits.describe(row, arguments)
    assert row.rule in text and row.page in text and row.operator in text


def test_every_break_belongs_to_one_limit_and_every_operator_has_limits() -> None:
    for start in BREAKS:
        assert len([row for row in limits.LIMITS if row.rule.startswith(start)]) == 1
    assert {row.operator for row in limits.LIMITS} == set(LAYER) == {ROUTE, MATMUL, SWIGLU, UNPERMUTE}


def test_pages_are_of_the_operator_they_are_cited_for() -> None:
    for row in limits.LIMITS:
        assert row.page.endswith(".md")
        assert row.operator in row.page or row.page == limits.UNPERMUTE_PAGE


TOO_LARGE = {
    "at most 1024 groups": Problem(4, 1025, 2, 64, 64, BF16, device="npu"),
    "K is at most 512": Problem(4, 8, 513, 64, 64, BF16, device="npu"),
    "the last axis of x in memory is under 65536": Problem(4, 8, 2, 65536, 64, BF16, device="npu"),
    "bf16 and fp16": Problem(4, 8, 2, 64, 64, torch.float32, device="npu"),
    "the tensors are on 'cpu'": Problem(4, 8, 2, 64, 64, BF16),
}


@pytest.mark.parametrize("words", TOO_LARGE)
def test_a_problem_past_a_limit_is_refused_before_any_launch(words: str) -> None:
    reason = AscendBackend().why_not(TOO_LARGE[words])
    assert reason is not None and words in reason


def test_a_problem_within_them_is_not() -> None:
    assert AscendBackend().why_not(Problem(4096, 128, 8, 2048, 768, BF16, device="npu")) is None
    assert AscendBackend().why_not(Problem(0, 128, 8, 2048, 768, torch.float16, device="npu")) is None


@pytest.mark.parametrize(
    "sizes", [(4, 1024, 2, 64, 64), (4, 512, 512, 64, 64), (4, 8, 2, 65535, 64), (4, 8, 2, 64, 65535)], ids=str
)
def test_a_problem_at_a_limit_is_not_refused(sizes: tuple[int, ...]) -> None:
    assert AscendBackend().why_not(Problem(*sizes, BF16, device="npu")) is None


def test_experts_of_one_device_are_held_against_the_limit() -> None:
    of_two = [AscendBackend().why_not(Problem(4, E, 2, 64, 64, BF16, device="npu", D=2)) for E in (2048, 2050)]
    assert of_two[0] is None and "at most 1024 groups" in str(of_two[1])


def test_without_torch_npu_the_backend_says_so() -> None:
    if registry.probe("ascend").available:
        pytest.skip("an NPU is here")
    with pytest.raises(Exception, match="torch_npu|CANN|NPU"):
        experts = Experts.dense(torch.zeros(2, 8, 4, dtype=BF16), torch.zeros(2, 4, 4, dtype=BF16))
        routing = Routing.from_topk(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1), 2)
        import ttnn_moe

        ttnn_moe.moe(torch.zeros(1, 4, dtype=BF16), routing, experts, backend="ascend")
