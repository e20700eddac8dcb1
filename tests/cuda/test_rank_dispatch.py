"""Dispatch of ranks on GPUs: virtual ranks on one GPU, ranks on several; bit for bit what the protocol delivers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rank_gpus import DispatchOnGpus, fast, gpu_counts, overlapping, spread, stalling
from ttnn_moe.contract import Placement
from ttnn_moe.cuda.combine.few import FewDispatchPlan
from ttnn_moe.cuda.combine.node import NodeDispatchPlan
from ttnn_moe.cuda.combine.rank_dispatch import DispatchPlan, RankDispatch
from ttnn_moe.cuda.jit import build
from ttnn_moe.errors import ContractError
from ttnn_moe.parallel.hierarchical.rings import Role

F16 = torch.float16
ODD = (40, 3, 0, 35, 1, 39, 34, 7)
PLANS = {
    "1 x 1": (DispatchPlan(1, 1, 64, 9, sms=2, K=3), (9,)),
    "1 x 2": (DispatchPlan(1, 2, 2048, 200, sms=4, slots=1), (200, 77)),
    "2 x 1, K 1": (DispatchPlan(2, 1, 2048, 200, sms=4, slots=2, K=1), (123, 200)),
    "1 x 2, H 7168": (DispatchPlan(1, 2, 7168, 500, sms=8), (500, 499)),
    "2 x 2, K 40": (DispatchPlan(2, 2, 264, 60, sms=3, K=40), (60, 0, 31, 5)),
    "2 x 4": (DispatchPlan(2, 4, 1024, 100, sms=4, slots=2, K=3), (100, 3, 0, 55, 1, 99, 64, 7)),
    "4 x 2, fp16": (DispatchPlan(4, 2, 8, 70, F16, sms=4, slots=1, K=2), (70, 3, 0, 55, 1, 69, 64, 7)),
    "1 x 8": (DispatchPlan(1, 8, 520, 40, sms=4, K=2), ODD),
    "8 x 1": (DispatchPlan(8, 1, 2048, 40, sms=4, K=2), ODD),
    "node, 1": (NodeDispatchPlan(1, 1, 64, 9, sms=2, K=3), (9,)),
    "node, 2": (NodeDispatchPlan(1, 2, 2048, 200, sms=4, K=40), (200, 77)),
    "node, 2, H 7168": (NodeDispatchPlan(1, 2, 7168, 500, sms=8), (500, 499)),
    "node, 4, fp16": (NodeDispatchPlan(1, 4, 8, 70, F16, sms=3, K=1), (60, 0, 31, 5)),
    "node, 8": (NodeDispatchPlan(1, 8, 520, 40, sms=4, K=3), ODD),
    "few, 1": (FewDispatchPlan(1, 1, 64, 9, sms=2, K=3), (9,)),
    "few, 2": (FewDispatchPlan(1, 2, 2048, 64, sms=4, K=40), (64, 33)),
    "few, 4, fp16": (FewDispatchPlan(1, 4, 8, 70, F16, sms=3, K=1), (60, 0, 31, 5)),
    "few, 8": (FewDispatchPlan(1, 8, 520, 40, sms=4, K=3), ODD),
    "nobody has a token": (DispatchPlan(2, 2, 64, 4, sms=2), (0, 0, 0, 0)),
}
APART = {
    "2 x 2": (DispatchPlan(2, 2, 1024, 400, sms=4, slots=2, K=3), (400, 3, 0, 55)),
    "node, 4": (NodeDispatchPlan(1, 4, 1024, 400, sms=4, K=3), (400, 3, 0, 55)),
    "few, 4": (FewDispatchPlan(1, 4, 264, 40, sms=3, K=3), (40, 3, 0, 5)),
}


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("case", ["2 x 4", "node, 8", "few, 8"])
def test_nvrtc_compiles_it(arch: str, case: str) -> None:
    plan = replace(PLANS[case][0], bulk=arch == "sm_90a" and not case.startswith("few"))
    assert build.compile_spec(plan.spec(arch))[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    "wrong",
    [{"K": 0}, {"H": 12}, {"T": 0}, {"slots": 3}, {"dtype": torch.float32}, {"T": 1 << 20}, {"send_rows": 9}],
    ids=str,
)
def test_a_plan_refuses_what_no_kernel_takes(wrong: dict) -> None:
    with pytest.raises(ContractError):
        replace(PLANS["2 x 4"][0], **wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpus:
    @pytest.mark.parametrize("bulk", [False, True], ids=["vectors", "bulk"])
    @pytest.mark.parametrize("gpus", gpu_counts())
    @pytest.mark.parametrize("case", PLANS.values(), ids=PLANS)
    def test_equals_the_protocols_dispatch(self, case: tuple, gpus: int, bulk: bool) -> None:
        plan, tokens = case
        plan = fast(plan) if bulk else plan
        DispatchOnGpus(plan, tokens, gpu_of=spread(plan, gpus)).run(5)

    @pytest.mark.parametrize("bulk", [False, True], ids=["vectors", "bulk"])
    @pytest.mark.parametrize("case", APART.values(), ids=APART)
    def test_a_rank_that_goes_ahead_waits_for_the_others(self, case: tuple, bulk: bool) -> None:
        plan, tokens = case
        DispatchOnGpus(overlapping(plan, bulk), tokens, apart=True).run_apart(40)

    @pytest.mark.parametrize(
        "change",
        [
            {"slots": 1},
            {"slots": 8},
            {"sms": 1},
            {"sms": 7},
            {"channels": 2},
            {"bulk": True, "slots": 1, "send_rows": 3, "take_rows": 2},
            {"overlap": True},
        ],
        ids=str,
    )
    def test_bits_depend_on_no_ring_channel_or_block(self, change: dict) -> None:
        plan, tokens = PLANS["2 x 4"]
        DispatchOnGpus(replace(plan, **change), tokens).run()

    @pytest.mark.parametrize("case", ["2 x 4", "node, 8", "few, 8"])
    def test_twenty_replays_of_a_graph_across_the_wrap_of_the_counters(self, case: str) -> None:
        plan, tokens = PLANS[case]
        if torch.cuda.get_device_capability() >= (9, 0):
            plan = fast(plan, overlap=True)
        DispatchOnGpus(plan, tokens, first=-3).replay(20)

    @pytest.mark.parametrize("gpus", gpu_counts())
    @pytest.mark.parametrize("rank", [0, 3, 6])
    @pytest.mark.parametrize("case", ["2 x 4", "node, 8", "few, 8"])
    def test_an_absent_rank_is_named(self, rank: int, case: str, gpus: int) -> None:
        plan, tokens = PLANS[case]
        DispatchOnGpus(plan, tokens, spread(plan, gpus), timeout=0.05, absent=[rank]).blames_absent(rank)

    @pytest.mark.parametrize("gpus", gpu_counts())
    @pytest.mark.parametrize("rank", [0, 5])
    @pytest.mark.parametrize(
        ("case", "role"),
        [
            ("2 x 4", Role.ANNOUNCER),
            ("2 x 4", Role.SENDER),
            ("2 x 4", Role.FORWARDER),
            ("2 x 4", Role.RECEIVER),
            ("node, 8", Role.ANNOUNCER),
            ("node, 8", Role.SENDER),
            ("few, 8", Role.SENDER),
        ],
    )
    def test_a_rank_that_stalls_is_named(self, rank: int, case: str, role: Role, gpus: int) -> None:
        plan = stalling(PLANS[case][0], rank, role)
        DispatchOnGpus(plan, (plan.T,) * 8, spread(plan, gpus), timeout=0.05).blames(rank)

    def test_another_number_of_ranks_is_refused(self) -> None:
        with pytest.raises(ContractError, match="topology"):
            RankDispatch(DispatchPlan(2, 4, 1024, 100), Placement.uniform(8, 4), 0, [0], [0] * 8)
