"""The combine kernel of ranks without a GPU: its source on the host, all ranks at once, equal to the tree oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from host_kernels import GXX
from rank_gpus import stalling
from rank_hosts import HostRanks, host_ranks
from ttnn_moe.cuda.combine.rank_combine import Plan
from ttnn_moe.parallel.hierarchical.rings import Role

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")
CASES = {
    "1 x 2, a ring of one slot": (Plan(1, 2, 264, 9, sms=1, channels=1, slots=1), (9, 5)),
    "3 x 2": (Plan(3, 2, 264, 6, sms=1, channels=1, slots=1, wire=torch.float32), (6, 4, 5, 6, 0, 6)),
    "2 x 1": (Plan(2, 1, 64, 9, sms=2, channels=1, slots=2), (4, 9)),
    "2 x 2, fp32 wire": (Plan(2, 2, 72, 7, sms=1, channels=2, slots=1, wire=torch.float32), (7, 0, 5, 1)),
    "2 x 2, fp16": (Plan(2, 2, 8, 7, torch.float16, sms=1, channels=2, slots=2, wire=torch.float16), (7, 6, 0, 2)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_tree_oracle(
    case: tuple[Plan, tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_ranks(tmp_path, monkeypatch)
    HostRanks(*case, first=-3).run(4)  # counters wrap around
    assert host.sound


MISTAKES = {
    "one bias": ("if (own.bias_1) add_elements", "if (false) add_elements"),
    "no flow control of the forwarder": ("item + 1 - g.call.slots, n * R_INTRA", "item - g.call.slots, n * R_INTRA"),
    "no flow control of the sender": (
        "const u32 want = item + 1 - g.call.slots;",
        "const u32 want = item - g.call.slots;",
    ),
    "does not wait for rows": ("!g.wait(comes, g.tail(g.rank, ring), got + 1, lane, FORWARDER)", "false"),
    "does not wait for partials": ("!g.wait(comes, g.tail(g.rank, ring), got + 1, r, RECEIVER)", "false"),
    "rows that nobody hears of": ("if (history >> pending & 1) *put = *put + 1;", ""),
    "nodes in no order": ("for (int n = 0; n < R_INTER; ++n) {", "for (int n = R_INTER - 1; n >= 0; --n) {"),
    "counts that no launch keeps": ("*g.got(ring) = read[i];", ""),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = host_ranks(tmp_path, monkeypatch, MISTAKES[mistake])
    plan, tokens = CASES["3 x 2"]
    host.library(plan.spec("sm_90a"))  # it compiles
    with pytest.raises(AssertionError):
        HostRanks(plan, tokens, timeout=0.5).run(2)


@pytest.mark.parametrize("role", [Role.SENDER, Role.FORWARDER, Role.RECEIVER])
def test_a_rank_that_stalls_is_named(role: Role, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = host_ranks(tmp_path, monkeypatch)
    plan = stalling(Plan(2, 2, 64, 12), 1, role)
    HostRanks(plan, (12,) * 4, timeout=0.2).blames(1)
    assert host.sound
