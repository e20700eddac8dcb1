"""Home buffers where L1 has little room beside the weights: programs are planned with smaller ones, and are right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

planner = pytest.importorskip("ttnn_moe._planner", reason="native planner: not built", exc_type=ModuleNotFoundError)

from tenstorrent_setup import Layer, OnDevice, check_rows, rows_of  # noqa: E402
from ttnn_moe import tenstorrent  # noqa: E402
from ttnn_moe.tenstorrent.device import Device  # noqa: E402
from ttnn_moe.tenstorrent.layer_sizes import Sizes, plan_layer  # noqa: E402
from ttnn_moe.tenstorrent.programs import programs_of  # noqa: E402

QWEN3_235B = {"E": 128, "E_local": 16, "K": 8, "H": 4096, "I": 1536}


def n150() -> Device:
    return Device.to_plan_for(planner.find_chip("n150"), 1)


def named(program) -> dict[str, int]:
    return program.kernels[0].named_compile_args


def test_qwen3_235b_has_programs_on_an_n150() -> None:
    assert programs_of(n150(), Sizes(**QWEN3_235B)).max_T == 1024
    assert programs_of(n150(), Sizes(**QWEN3_235B | {"I": 1504})).max_T == 1024


@pytest.mark.parametrize("weights", [1, 2])
@pytest.mark.parametrize("T", [32, 4096])
def test_gate_up_has_the_largest_home_that_fits(T: int, weights: int) -> None:
    """Of 256 KiB, halves and so on. Where all of it fits, it stays."""
    problem, machine = planner.Problem(T=T, **QWEN3_235B | {"I": 1024}), n150().machine
    whole = planner.plan_gate_up(problem, machine, weights)
    assert whole.l1_bytes <= machine.usable_l1
    slots, chunk, window = (named(whole)[name] for name in ("slots", "chunk", "window"))
    assert 2 * slots * chunk * 2048 <= 256 * 1024 and window >= min(8, problem.max_blocks)
    # 1 KiB less than it takes: the next smaller buffer
    less = planner.Machine(grid=machine.grid, l1_bytes=whole.l1_bytes + 128 * 1024 - 1024, dram_banks=12)
    ahead = named(whole)["weights_ahead"]
    smaller = planner.plan_gate_up(problem, less, weights)
    assert smaller.l1_bytes <= less.usable_l1
    if ahead == 1:
        assert named(smaller)["slots"] < slots and 1 <= named(smaller)["window"] < window
    else:
        assert (named(smaller)["slots"], named(smaller)["weights_ahead"]) == (slots, 1)


@settings(max_examples=100, deadline=None)
@given(
    E=st.integers(1, 128),
    K=st.integers(2, 128),
    h=st.integers(1, 40),
    i=st.integers(1, 40),
    grid=st.sampled_from([(2, 1), (3, 2), (8, 8)]),
    form=st.sampled_from(["bfloat16", "bfloat4_b"]),
    kib=st.integers(160, 400),
)
def test_what_has_programs_for_one_expert_a_token_has_them_for_more(E, K, h, i, grid, form, kib) -> None:
    """So load_experts, which does not know K, refuses all experts that no call could run."""
    machine = planner.Machine(grid=grid, l1_bytes=kib * 1024)
    try:
        plan_layer(Sizes(E, E, 1, 32 * h, 32 * i, form), machine, 32)
    except ValueError:
        return
    plan_layer(Sizes(E, E, min(K, E), 32 * h, 32 * i, form), machine, 32)


@pytest.mark.parametrize("K", [1, 2, 8])
def test_experts_that_load_run_whatever_k_is(emulated: None, K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTNN_MOE_TT_CACHE", "off")
    device = tenstorrent.open_device(device="emulator:n150")
    device.machine = planner.Machine(grid=(3, 2), l1_bytes=device.machine.l1_bytes, dram_banks=12)
    device.handle.exact = False
    layer = Layer.make(T=3, E=48, K=K, H=256, I=2112)
    there = tenstorrent.load_experts(layer.experts)
    assert programs_of(device, there.sizes(K)).max_T >= 32


@pytest.mark.parametrize("chip", ["n150", "p150"])
def test_kernels_take_a_smaller_home(emulated: None, chip: str) -> None:
    """Windows of 16 blocks down to 2 give the same rows, bit for bit."""
    layer = Layer.make(T=150, E=5, K=2, H=512, I=96)
    device = tenstorrent.open_device(device=f"emulator:{chip}")
    on = OnDevice(layer, device)
    got, windows = [], []
    for kib in (1400, 596, 468, 404):
        device.machine = planner.Machine(grid=(2, 2), l1_bytes=kib * 1024, dram_banks=device.machine.dram_banks)
        on.programs._plans.clear()
        windows.append(named(on.programs.plan("gate_up", 256))["window"])
        routed = on.route()
        got.append(on.back(on.programs.gate_up(on.hidden, routed, on.gate, on.up)))
        check_rows(layer, {"activations": got[-1]})
    assert windows == [16, 8, 4, 2]
    for rows in got[1:]:
        for _, first, tokens in rows_of(layer):
            here = slice(first, first + len(tokens))
            assert torch.equal(rows[here], got[0][here])
