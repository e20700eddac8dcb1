"""Planning npu_moe_distribute_dispatch_v2 and combine_v2: ranges, buffer, ids; a call that breaks each limit."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ttnn_moe import Placement, Problem, Routing
from ttnn_moe.ascend.limits import Limit, broken
from ttnn_moe.ascend.operators import COMBINE, DISPATCH, EXCHANGE
from ttnn_moe.errors import BackendUnavailable
from ttnn_moe.parallel.exchanges.npu import DispatchCombine, Plan, plan, unique_ids
from ttnn_moe.parallel.exchanges.npu_limits import EXCHANGE_LIMITS, buffer_bytes

BF16 = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def good(operator: str) -> dict[str, Any]:
    """Qwen3-30B-A3B over 16 ranks of two servers."""
    made = Plan("hierarchy", 16, 3, 128, 8, 2048, 128, BF16, 0)
    return dict(next(arguments for name, arguments in made.calls("group") if name == operator))


def rows(a: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
    a[name if name in a else "expand_x"] = tensor


def hidden(a: dict[str, Any], H: int, dtype: torch.dtype = BF16) -> None:
    rows(a, "x", empty(a["x"].shape[0] if "x" in a else a["expand_x"].shape[0], H, dtype=dtype))


def tokens(a: dict[str, Any], n: int, K: int = 8) -> None:
    a.update(expert_ids=empty(n, K, dtype=torch.int32), expert_scales=empty(n, K, dtype=torch.float32))
    a["global_bs"] = 0


def many_tokens(a: dict[str, Any]) -> None:
    tokens(a, 513)
    if "expand_x" in a:
        came(a, 513 * 16 * 8)


def many_choices(a: dict[str, Any]) -> None:
    tokens(a, 128, 17)


def came(a: dict[str, Any], A: int) -> None:
    a.update(expand_x=empty(A, 2048), expand_scales=empty(A, dtype=torch.float32))
    a.update(assist_info_for_combine=empty(A * 128, dtype=torch.int32))


BREAKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "comm_alg is fullmesh or hierarchy": lambda a: a.update(comm_alg=""),
    "ep_world_size is 16, 32 or 64": lambda a: a.update(ep_world_size=8),
    "ep_rank_id is one": lambda a: a.update(ep_rank_id=16),
    "group_ep is a name": lambda a: a.update(group_ep="x" * 128),
    "moe_expert_num is 1 to 1024": lambda a: a.update(moe_expert_num=1040),
    "moe_expert_num is a multiple": lambda a: a.update(moe_expert_num=129),
    "hidden rows are [rows, H]": lambda a: hidden(a, 2048, torch.float32),
    "H is a multiple of 32": lambda a: hidden(a, 2050),
    "H is at most 7168": lambda a: hidden(a, 10272),
    "a process has 1 to 256 tokens": many_tokens,
    "K is 1 to 16": many_choices,
    "expert_ids is [tokens, K] int32": lambda a: a.update(expert_ids=empty(128, 8, dtype=torch.int64)),
    "expert_scales is [tokens, K] fp32": lambda a: a.update(expert_scales=empty(128, 8)),
    "global_bs is 0 or": lambda a: a.update(global_bs=127 * 16),
    "quant_mode is 0 or 2": lambda a: a.update(quant_mode=1),
    "expert_token_nums_type is 0 or 1": lambda a: a.update(expert_token_nums_type=2),
    "comm_quant_mode is 0, or 2": lambda a: a.update(comm_quant_mode=1),
    "expand_scales is [A] fp32": lambda a: a.update(expand_scales=None),
    "assist_info_for_combine is": lambda a: a.update(assist_info_for_combine=empty(128, dtype=torch.int32)),
    "expand_x holds at least": lambda a: came(a, 1024),
    "there are no shared experts": lambda a: a.update(shared_expert_rank_num=1),
}


@pytest.mark.parametrize("row", EXCHANGE_LIMITS, ids=lambda row: f"{row.operator[19:]}: {row.rule[:50]}")
def test_each_limit_refuses_what_breaks_it(row: Limit) -> None:
    (change,) = [change for start, change in BREAKS.items() if row.rule.startswith(start)]
    arguments = good(row.operator)
    assert broken(row.operator, arguments, EXCHANGE_LIMITS) == []
    change(arguments)
    assert broken(row.operator, arguments, EXCHANGE_LIMITS) == [row]
    assert row.operator in row.page


def test_every_break_has_its_limit() -> None:
    assert all(any(row.rule.startswith(start) for row in EXCHANGE_LIMITS) for start in BREAKS)
    assert {row.operator for row in EXCHANGE_LIMITS} == {DISPATCH, COMBINE}


def planned(D: int, T: int = 128, E: int = 128, K: int = 8, H: int = 2048) -> Plan:
    return plan(Problem(T, E, K, H, 768, BF16, D=D), Placement.uniform(E, D, 0))


@pytest.mark.parametrize(
    "D, T, want",
    [
        (16, 128, "hierarchy"),
        (32, 512, "hierarchy"),
        (64, 1, "hierarchy"),
        (8, 256, "fullmesh"),
        (2, 1, "fullmesh"),
        (128, 64, "fullmesh"),
    ],
)
def test_the_algorithm_follows_from_the_documented_ranges(D: int, T: int, want: str, monkeypatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "4000")
    made = planned(D, T)
    assert made.comm_alg == want
    assert made.buffer == buffer_bytes(want, T, D, 128, 8, 2048)
    for operator, arguments in made.calls("group"):
        assert broken(operator, arguments, EXCHANGE_LIMITS) == []


@pytest.mark.parametrize(
    "sizes, words",
    [
        ({"D": 16, "T": 513}, "1 to 256 tokens"),
        ({"D": 8, "T": 257}, "1 to 256 tokens"),
        ({"D": 16, "H": 2064}, "multiple of 32"),
        ({"D": 8, "H": 8192}, "at most 7168"),
        ({"D": 16, "K": 17}, "K is 1 to 16"),
        ({"D": 24, "E": 120}, "ep_world_size"),
        ({"D": 1}, "ep_world_size"),
    ],
)
def test_other_sizes_are_refused_with_the_rule_and_the_way_out(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(BackendUnavailable, match=words) as error:
        planned(**sizes)
    assert "exchange='all_to_all'" in str(error.value) and "torch_npu-npu_moe_distribute" in str(error.value)


def test_the_buffer_of_the_pages_formulas() -> None:
    """hierarchy: (128 + 16 / 4) blocks of 512 * (2048 * 2 + 4 * 8 * 4) bytes, and 8 MB; by hand."""
    assert buffer_bytes("hierarchy", 512, 16, 128, 8, 2048) == 132 * 2_162_688 + 8 * 2**20 == 293_863_424
    assert buffer_bytes("hierarchy", 1, 16, 16, 3, 32) == 20 * 512 + 8 * 2**20  # 64 + 128 bytes, up to 512
    assert buffer_bytes("fullmesh", 256, 8, 128, 8, 2048) == 2 * (256 * 8 * 8 * 4096 + 2 * 2**20)
    assert buffer_bytes("fullmesh", 4, 8, 8, 8, 64) == 2 * (4 * 8 * 1 * 128 + 2 * 2**20)  # one expert a rank


def test_a_buffer_that_is_too_small_is_refused_with_the_value_to_set(monkeypatch) -> None:
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    with pytest.raises(BackendUnavailable, match="export HCCL_BUFFSIZE=281 ") as error:
        planned(16, 512)
    assert "unset (200)" in str(error.value)
    monkeypatch.setenv("HCCL_BUFFSIZE", "280")
    with pytest.raises(BackendUnavailable, match="HCCL_BUFFSIZE=280"):
        planned(16, 512)
    monkeypatch.setenv("HCCL_BUFFSIZE", "281")
    assert planned(16, 512).comm_alg == "hierarchy"


@pytest.mark.parametrize(
    "driver, want",
    [
        ("24.1.RC3", "fullmesh"),
        ("25.0.rc1", "fullmesh"),
        ("25.0.RC1.1", "hierarchy"),
        ("25.2.0", "hierarchy"),
        ("", "hierarchy"),
    ],
)
def test_an_older_driver_has_no_hierarchy(driver: str, want: str, monkeypatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "4000")
    placement = Placement.uniform(128, 16, 0)
    assert plan(Problem(128, 128, 8, 2048, 768, BF16, D=16), placement, driver).comm_alg == want
    if want == "fullmesh":  # whose 256 tokens are too few here
        with pytest.raises(BackendUnavailable, match=f"the driver is {driver}, older than 25.0.RC1.1"):
            plan(Problem(512, 128, 8, 2048, 768, BF16, D=16), placement, driver)


def test_a_torch_npu_without_the_second_version_is_refused() -> None:
    old = types.SimpleNamespace(npu_moe_distribute_dispatch=None)
    with pytest.raises(BackendUnavailable, match="npu_moe_distribute_dispatch_v2, npu_moe_distribute_combine_v2"):
        DispatchCombine(old, planned(8), Placement.uniform(128, 8, 0), "group")
    assert EXCHANGE == (DISPATCH, COMBINE)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ids_are_renumbered_merged_and_filled(data: st.DataObject) -> None:
    D, E_local = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    E = D * E_local
    K, T = data.draw(st.integers(1, E)), data.draw(st.integers(1, 6))
    numbers = data.draw(st.permutations(range(E)))
    placement = Placement.from_mapping([numbers[d * E_local : (d + 1) * E_local] for d in range(D)])
    ids = torch.tensor(data.draw(st.lists(st.integers(-2, E), min_size=T * K, max_size=T * K))).view(T, K)
    weights = torch.rand(T, K)
    contiguous = torch.empty(E, dtype=torch.int32)
    contiguous[placement.device_expert_mapping.flatten().long()] = torch.arange(E, dtype=torch.int32)
    new, scaled, absent = unique_ids(Routing.from_topk(ids, weights, E), contiguous)
    for t in range(T):
        assert len(set(new[t].tolist())) == K and 0 <= int(new[t].min()) and int(new[t].max()) < E
        want: dict[int, float] = {}
        for k in range(K):
            e = int(ids[t, k])
            if 0 <= e < E:
                want[e] = want.get(e, 0.0) + float(weights[t, k])
        got = {
            int(placement.device_expert_mapping[int(n) // E_local, int(n) % E_local]): float(w)
            for n, w, gone in zip(new[t], scaled[t], absent[t], strict=True)
            if not gone
        }
        assert got.keys() == want.keys()
        assert all(got[e] == pytest.approx(want[e], rel=1e-6) for e in want)
        assert bool((scaled[t][absent[t]] == 0).all())


def test_pairs_without_an_expert_are_spread_over_the_experts() -> None:
    ids = torch.full((64, 2), -1)
    new, _, _ = unique_ids(Routing.from_topk(ids, torch.ones(64, 2), 16), torch.arange(16, dtype=torch.int32))
    counts = torch.bincount(new.flatten(), minlength=16)
    assert int(counts.max()) == int(counts.min()) == 8
