"""Combine of ranks on GPUs: virtual ranks on one GPU, ranks on several, equal to the tree oracle bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rank_gpus import GpuRanks, fast, gpu_counts, overlapping, spread, stalling
from ttnn_moe.cuda.combine.few import FewCombinePlan
from ttnn_moe.cuda.combine.node import NodeCombinePlan
from ttnn_moe.cuda.combine.rank_combine import Plan, RankCombine, pointers
from ttnn_moe.cuda.jit import build
from ttnn_moe.errors import ContractError
from ttnn_moe.parallel.hierarchical.rings import Role

F32, F16 = torch.float32, torch.float16
PLANS = {
    "1 x 1": (Plan(1, 1, 64, 9, sms=2), (9,)),
    "1 x 2": (Plan(1, 2, 2048, 200, sms=4, slots=1), (200, 77)),
    "2 x 1": (Plan(2, 1, 2048, 200, sms=4, slots=2), (123, 200)),
    "1 x 2, H 7168": (Plan(1, 2, 7168, 500, sms=8), (500, 499)),
    "2 x 2, fp32 wire": (Plan(2, 2, 264, 60, sms=3, wire=F32), (60, 0, 31, 5)),
    "2 x 4": (Plan(2, 4, 1024, 100, sms=4, slots=2), (100, 3, 0, 55, 1, 99, 64, 7)),
    "4 x 2, fp16": (Plan(4, 2, 8, 70, dtype=F16, wire=F16, sms=4, slots=1), (70, 3, 0, 55, 1, 69, 64, 7)),
    "1 x 8, fp32 wire": (Plan(1, 8, 520, 40, sms=4, wire=F32), (40, 3, 0, 35, 1, 39, 34, 7)),
    "8 x 1": (Plan(8, 1, 2048, 40, sms=4), (40, 3, 0, 35, 1, 39, 34, 7)),
    "node, 1": (NodeCombinePlan(1, 1, 64, 9, sms=2), (9,)),
    "node, 2": (NodeCombinePlan(1, 2, 2048, 200, sms=4), (200, 77)),
    "node, 2, H 7168": (NodeCombinePlan(1, 2, 7168, 500, sms=8), (500, 499)),
    "node, 4, fp16": (NodeCombinePlan(1, 4, 264, 60, F16, sms=3), (60, 0, 31, 5)),
    "node, 8": (NodeCombinePlan(1, 8, 520, 40, sms=4), (40, 3, 0, 35, 1, 39, 34, 7)),
    "few, 1": (FewCombinePlan(1, 1, 64, 9, sms=2), (9,)),
    "few, 2": (FewCombinePlan(1, 2, 2048, 64, sms=4), (64, 33)),
    "few, 4, fp16": (FewCombinePlan(1, 4, 264, 40, F16, sms=3), (40, 0, 31, 5)),
    "few, 8": (FewCombinePlan(1, 8, 520, 40, sms=4), (40, 3, 0, 35, 1, 39, 34, 7)),
    "nobody has a token": (Plan(2, 2, 64, 4, sms=2), (0, 0, 0, 0)),
}
APART = {
    "2 x 2": (Plan(2, 2, 1024, 400, sms=4, slots=2), (400, 3, 0, 55)),
    "node, 4": (NodeCombinePlan(1, 4, 1024, 1500, sms=1), (1500, 3, 0, 55)),  # rows are read for long
    "few, 4": (FewCombinePlan(1, 4, 264, 40, sms=3), (40, 3, 0, 5)),
}


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("case", ["2 x 4", "node, 8", "few, 8"])
def test_nvrtc_compiles_it(arch: str, case: str) -> None:
    plan = replace(PLANS[case][0], bulk=arch == "sm_90a" and not case.startswith("few"))
    assert build.compile_spec(plan.spec(arch))[:4] == b"\x7fELF"


def test_a_plan_refuses_what_no_kernel_takes() -> None:
    plan, _ = PLANS["2 x 4"]
    for wrong in (
        {"inter": 8, "intra": 8},
        {"H": 12},
        {"T": 0},
        {"slots": 3},
        {"wire": F16},
        {"dtype": F32},
        {"bulk": True, "wire": F32},
    ):
        with pytest.raises(ContractError):
            replace(plan, **wrong)


def test_rows_are_numbered_by_rank_then_token() -> None:
    masks, rows, T = pointers([torch.tensor([2, 3]), torch.tensor([1]), torch.tensor([2, 0, 6])], 4, 1)
    assert masks.tolist() == [[2, 3, 0, 0], [1, 0, 0, 0], [2, 0, 6, 0]]
    assert rows.tolist() == [[0, 1, -1, -1], [-1] * 4, [2, -1, 3, -1]]
    assert T.tolist() == [2, 1, 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpus:
    @pytest.mark.parametrize("bulk", [False, True], ids=["vectors", "bulk"])
    @pytest.mark.parametrize("gpus", gpu_counts())
    @pytest.mark.parametrize("case", PLANS.values(), ids=PLANS)
    def test_equals_the_tree_oracle(self, case: tuple, gpus: int, bulk: bool) -> None:
        plan, tokens = case
        plan = fast(plan) if bulk else plan
        GpuRanks(plan, tokens, gpu_of=spread(plan, gpus)).run(5)

    @pytest.mark.parametrize("bulk", [False, True], ids=["vectors", "bulk"])
    @pytest.mark.parametrize("case", APART.values(), ids=APART)
    def test_a_rank_that_goes_ahead_waits_for_the_others(self, case: tuple, bulk: bool) -> None:
        plan, tokens = case
        GpuRanks(overlapping(plan, bulk), tokens, apart=True).run_apart(40)

    @pytest.mark.parametrize(
        "change",
        [
            {"slots": 1},
            {"slots": 8},
            {"sms": 1},
            {"sms": 7},
            {"channels": 2},
            {"bulk": True, "slots": 1, "send_rows": 3},
            {"bulk": True, "stages": 1},
            {"overlap": True},
        ],
        ids=str,
    )
    def test_bits_depend_on_no_ring_channel_or_block(self, change: dict) -> None:
        plan, tokens = PLANS["2 x 4"]
        GpuRanks(replace(plan, **change), tokens, biases=False).run()

    @pytest.mark.parametrize("case", ["2 x 4", "node, 8", "few, 8"])
    def test_twenty_replays_of_a_graph_across_the_wrap_of_the_counters(self, case: str) -> None:
        plan, tokens = PLANS[case]
        if torch.cuda.get_device_capability() >= (9, 0):
            plan = fast(plan, overlap=True)
        GpuRanks(plan, tokens, first=-3).replay(20)

    @pytest.mark.parametrize("gpus", gpu_counts())
    @pytest.mark.parametrize("rank", [0, 3, 6])
    @pytest.mark.parametrize("case", ["2 x 4", "node, 8", "few, 8"])
    def test_an_absent_rank_is_named(self, rank: int, case: str, gpus: int) -> None:
        plan, tokens = PLANS[case]
        GpuRanks(plan, tokens, spread(plan, gpus), timeout=0.05, absent=[rank]).blames_absent(rank)

    @pytest.mark.parametrize("gpus", gpu_counts())
    @pytest.mark.parametrize("rank", [0, 5])
    @pytest.mark.parametrize(
        ("case", "role"),
        [
            ("2 x 4", Role.SENDER),
            ("2 x 4", Role.FORWARDER),
            ("2 x 4", Role.RECEIVER),
            ("node, 8", Role.RECEIVER),
            ("few, 8", Role.SENDER),
        ],
    )
    def test_a_rank_that_stalls_is_named(self, rank: int, case: str, role: Role, gpus: int) -> None:
        plan = stalling(PLANS[case][0], rank, role)
        GpuRanks(plan, (plan.T,) * 8, spread(plan, gpus), timeout=0.05).blames(rank)

    def test_too_many_blocks_are_refused(self) -> None:
        plan, tokens = PLANS["2 x 4"]
        with pytest.raises(ContractError, match="same time"):
            RankCombine(replace(plan, sms=10_000), 0, [0], [0] * 8)
