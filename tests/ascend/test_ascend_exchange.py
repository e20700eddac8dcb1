"""Planning npu_moe_distribute_dispatch_v2 and combine_v2: ranges, buffer, ids; a call that breaks each limit."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_machines import machines
from ttnn_moe import Placement, Problem, Routing
from ttnn_moe.ascend.limits import Limit, broken
from ttnn_moe.ascend.machine import Machine
from ttnn_moe.ascend.operators import COMBINE, DISPATCH, EXCHANGE
from ttnn_moe.errors import BackendUnavailable
from ttnn_moe.parallel.exchanges.npu import DispatchCombine, turns, unique_ids
from ttnn_moe.parallel.exchanges.npu_limits import RELEASES, Release, limits_of, release_of
from ttnn_moe.parallel.exchanges.npu_plan import Plan, plan

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
    "moe_expert_num is at least 1": lambda a: a.update(moe_expert_num=528),
    "moe_expert_num is a multiple": lambda a: a.update(moe_expert_num=129),
    "a process has at most 24 experts": lambda a: a.update(moe_expert_num=400, comm_alg="fullmesh"),
    "hidden rows are [rows, H]": lambda a: hidden(a, 2048, torch.float32),
    "H is a multiple of 32": lambda a: hidden(a, 2050),
    "H is at most 10240": lambda a: hidden(a, 10272),
    "a process has 1 token": many_tokens,
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
ROWS = [(release, row) for release in RELEASES for row in limits_of(release)]


@pytest.mark.parametrize(
    "release, row", ROWS, ids=[f"{release.cann[0]}: {row.operator[19:]}: {row.rule[:50]}" for release, row in ROWS]
)
def test_each_limit_refuses_what_breaks_it(release: Release, row: Limit) -> None:
    (change,) = [change for start, change in BREAKS.items() if row.rule.startswith(start)]
    arguments = good(row.operator)
    assert broken(row.operator, arguments, limits_of(release)) == []
    change(arguments)
    assert broken(row.operator, arguments, limits_of(release)) == [row]
    assert row.operator in row.page


def test_every_break_has_its_limit() -> None:
    assert all(any(row.rule.startswith(start) for _, row in ROWS) for start in BREAKS)
    assert {row.operator for _, row in ROWS} == {DISPATCH, COMBINE}


def planned(
    D: int, T: int = 128, E: int = 128, K: int = 8, H: int = 2048, ranks: list[Machine] | None = None, **machine: Any
) -> Plan:
    """machine: of every rank, as in ascend_machines. ranks: the machines themselves."""
    problem = Problem(T, E, K, H, 768, BF16, D=D)
    return plan(problem, Placement.uniform(E, D, 0), ranks or machines(D, **machine))


@pytest.mark.parametrize(
    "cann, sizes, want",
    [
        ("9.0.0", {"D": 16, "T": 128}, "hierarchy"),
        ("9.0.0", {"D": 32, "T": 512}, "hierarchy"),
        ("9.0.0", {"D": 64, "T": 1}, "hierarchy"),
        ("9.0.0", {"D": 8, "T": 256}, "fullmesh"),
        ("9.0.0", {"D": 2, "T": 1}, "fullmesh"),
        ("9.0.0", {"D": 128, "T": 64}, "fullmesh"),
        ("9.1.0", {"D": 16, "T": 16, "E": 1024}, "fullmesh"),
        ("8.5.0", {"D": 16, "T": 256}, "hierarchy"),
        ("8.3.RC1", {"D": 16, "T": 16, "E": 512}, "hierarchy"),
        ("8.5.0", {"D": 24, "T": 64, "E": 120}, "fullmesh"),
        ("8.5.0", {"D": 256, "T": 8, "E": 256}, "fullmesh"),
    ],
)
def test_the_algorithm_follows_from_the_documented_ranges(cann: str, sizes: dict[str, int], want: str) -> None:
    made, release = planned(cann=cann, **sizes), release_of(cann)  # type: ignore[arg-type]
    assert made.comm_alg == want and release is not None
    assert made.buffer == release.buffer_bytes(want, made.tokens, made.ranks, made.E, 8, 2048)
    for operator, arguments in made.calls("group"):
        assert broken(operator, arguments, limits_of(release)) == []


@pytest.mark.parametrize(
    "cann, sizes, words",
    [
        ("9.0.0", {"D": 16, "T": 513}, "at most 512 with hierarchy, 256 with fullmesh"),
        ("9.0.0", {"D": 8, "T": 257}, "256 with fullmesh"),
        ("9.0.0", {"D": 16, "H": 2064}, "multiple of 32"),
        ("9.0.0", {"D": 8, "H": 8192}, "7168 with fullmesh"),
        ("9.0.0", {"D": 16, "K": 17}, "K is 1 to 16"),
        ("9.0.0", {"D": 24, "E": 120}, "ep_world_size"),
        ("9.0.0", {"D": 1}, "ep_world_size"),
        ("9.0.0", {"D": 16, "E": 1040}, "1024 with fullmesh"),
        ("8.5.0", {"D": 16, "T": 257}, "at most 256 with hierarchy, 256 with fullmesh"),
        ("8.5.0", {"D": 8}, "a multiple of 8 from 16 to 256"),
        ("8.3.RC1", {"D": 2}, "16, 32 or 64 with hierarchy"),
        ("8.5.0", {"D": 24, "E": 600}, "at most 512 with hierarchy, 512 with fullmesh"),
        ("8.5.0", {"D": 40, "E": 1000}, "moe_expert_num"),
    ],
)
def test_other_sizes_are_refused_with_the_rule_and_the_way_out(cann: str, sizes: dict[str, int], words: str) -> None:
    with pytest.raises(BackendUnavailable, match=words) as error:
        planned(cann=cann, **sizes)  # type: ignore[arg-type]
    assert "exchange='all_gather'" in str(error.value) and "torch_npu-npu_moe_distribute" in str(error.value)
    assert f"CANN {cann}" in str(error.value)


def test_fullmesh_of_the_older_canns_has_24_experts_a_rank() -> None:
    assert planned(24, 8, 24 * 21, cann="8.5.0").comm_alg == "fullmesh"
    arguments = dict(planned(24, 8, 24 * 21, cann="8.5.0").calls("group")[0][1])
    arguments.update(moe_expert_num=16 * 25, ep_world_size=16)
    (row,) = broken(DISPATCH, arguments, limits_of(RELEASES[0]))
    assert row.rule == "a process has at most 24 experts with fullmesh"


MB = 2**20


@pytest.mark.parametrize(
    "cann, alg, sizes, want",
    [
        # (128 + 16 / 4) blocks of 512 * (2048 * 2 + 4 * 8 * 4) bytes, and 8 MB; by hand
        ("9.0.0", "hierarchy", (512, 16, 128, 8, 2048), 132 * 2_162_688 + 8 * MB),
        ("9.0.0", "hierarchy", (1, 16, 16, 3, 32), 20 * 512 + 8 * MB),  # 64 + 128 bytes, up to 512
        ("9.0.0", "fullmesh", (256, 8, 128, 8, 2048), 2 * (256 * 8 * 8 * 4096 + 2 * MB)),
        ("9.0.0", "fullmesh", (4, 8, 8, 8, 64), 2 * (4 * 8 * 1 * 128 + 2 * MB)),  # one expert a rank
        # 128 experts, 256 tokens of 2 * 2048 + 16 * 8 bytes: 132 MB, and 104 MB
        ("8.5.0", "hierarchy", (256, 16, 128, 8, 2048), 236 * MB),
        ("8.3.RC1", "hierarchy", (256, 16, 128, 8, 2048), 236 * MB),
        ("8.5.0", "fullmesh", (256, 16, 128, 8, 2048), 260 * MB),
    ],
)
def test_the_buffer_of_the_pages_formulas(cann: str, alg: str, sizes: tuple[int, ...], want: int) -> None:
    release = release_of(cann)
    assert release is not None and release.buffer_bytes(alg, *sizes) == want


@pytest.mark.parametrize("cann, tokens, need", [("9.0.0", 512, 281), ("8.5.0", 256, 236)])
def test_a_buffer_that_is_too_small_is_refused_with_the_value_to_set(cann: str, tokens: int, need: int) -> None:
    with pytest.raises(BackendUnavailable, match=f"export HCCL_BUFFSIZE={need} ") as error:
        planned(16, tokens, cann=cann, buffer="")
    assert "unset (200)" in str(error.value)
    for wrong in (str(need - 1), "300MB", "-1"):
        with pytest.raises(BackendUnavailable, match=f"got HCCL_BUFFSIZE={wrong};.*at least {need} "):
            planned(16, tokens, cann=cann, buffer=wrong)
    assert planned(16, tokens, cann=cann, buffer=str(need)).comm_alg == "hierarchy"
    one_small = [*machines(15, cann, str(need)), *machines(1, cann, str(need - 1), server="1")]
    with pytest.raises(
        BackendUnavailable, match=f"HCCL_BUFFSIZE={need} on 15 ranks, HCCL_BUFFSIZE={need - 1} on 1 rank"
    ):
        planned(16, tokens, ranks=one_small)


@pytest.mark.parametrize(
    "ranks, words",
    [
        (machines(16, cann=""), "CANN's version is not known.*set_env.sh"),
        (machines(16, cann="8.2.RC1"), "limits of this CANN are not known.*got 8.2.RC1.*expected CANN 8.3, 8.5, 9"),
        (machines(8) + machines(8, cann="8.5.0", server="1"), "different CANNs.*9.0.0 on 8 ranks, 8.5.0 on 8 ranks"),
        (machines(16, lacks=(DISPATCH,)), f"this torch_npu has no {DISPATCH}"),
        (machines(16, of_server=4), "8 ranks on each server.*0 on 4 ranks, 1 on 4 ranks"),
        (machines(16, of_server=16), "8 ranks on each server.*got 0;"),
        (machines(12) + machines(4, server="2"), "8 ranks on each server"),
        (machines(8, of_server=4), "8 ranks on each server"),
        ([machines(16)[i] for i in (*range(0, 16, 2), *range(1, 16, 2))], "in the order of the servers"),
        (machines(16, cards=16), "count 8 NPUs a server; got a server of 16"),
        (machines(16, network=""), "two servers may be joined by cables.*export TTNN_MOE_ASCEND_NETWORK=switch"),
        (machines(16, network="cable"), "TTNN_MOE_ASCEND_NETWORK=cable"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_the_ranks_run_on_is_refused_with_the_reason(ranks: list[Machine], words: str) -> None:
    with pytest.raises(BackendUnavailable, match=words) as error:
        planned(len(ranks), ranks=ranks)
    assert "to fix it:" in str(error.value)


def test_more_servers_than_two_need_a_switch_anyway() -> None:
    assert planned(32, network="").comm_alg == "hierarchy"
    assert planned(8, network="").comm_alg == "fullmesh", "one server needs none"


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
def test_an_older_driver_has_no_hierarchy(driver: str, want: str) -> None:
    assert planned(16, driver=driver).comm_alg == want
    if want == "fullmesh":  # whose 256 tokens are too few here
        with pytest.raises(BackendUnavailable, match=f"the driver is {driver}, older than 25.0.RC1.1"):
            planned(16, 512, driver=driver)
        one_old = [*machines(15, driver="25.2.0"), *machines(1, driver=driver, server="1")]
        assert planned(16, ranks=one_old).comm_alg == "fullmesh", "one rank has it"


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
    new, scaled, absent = unique_ids(Routing.from_topk(ids, weights, E), contiguous, turns(T + 3, E, K))
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
    routing, numbers = Routing.from_topk(ids, torch.ones(64, 2), 16), torch.arange(16, dtype=torch.int32)
    new, _, _ = unique_ids(routing, numbers, turns(64, 16, 2))
    counts = torch.bincount(new.flatten(), minlength=16)
    assert int(counts.max()) == int(counts.min()) == 8
