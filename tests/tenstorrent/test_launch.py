"""Launches of a program that has run before: a call patches a descriptor, and the chip gets what a new one would give.

On ttnn's host side without a device (tests/support/ttnn_host.py); on simulators: tenstorrent_host_runs.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("ttnn_moe._planner", reason="native planner: not built", exc_type=ModuleNotFoundError)

import ttnn_host  # noqa: E402
from benchmark_scripts import script  # noqa: E402
from ttnn_moe import ContractError, Placement, tenstorrent  # noqa: E402
from ttnn_moe import _planner as planner  # noqa: E402
from ttnn_moe.models.qwen3.tt import profile  # noqa: E402
from ttnn_moe.tenstorrent import runtime, tensors  # noqa: E402
from ttnn_moe.tenstorrent.device import Device  # noqa: E402
from ttnn_moe.tenstorrent.emulator import CHIPS as emulator_chips  # noqa: E402
from ttnn_moe.tenstorrent.emulator import library as emulator_library  # noqa: E402
from ttnn_moe.tenstorrent.experts import DeviceExperts  # noqa: E402
from ttnn_moe.tenstorrent.launch import Launcher  # noqa: E402
from ttnn_moe.tenstorrent.layer_sizes import Sizes  # noqa: E402
from ttnn_moe.tenstorrent.programs import LayerPrograms, programs_of  # noqa: E402

CHIPS = {"blackhole": (13, 10), "wormhole_b0": (8, 7)}
E, K, H, I = 16, 2, 96, 64


@pytest.fixture(params=CHIPS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(runtime, "_emulated", ttnn_host)
    yield Device.of(ttnn_host.Device(request.param, CHIPS[request.param]))


@pytest.mark.parametrize("arch", CHIPS)
def test_l1_is_what_the_device_says_else_the_table_s(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = ttnn_host.Device(arch, CHIPS[arch])
    assert Device.of(handle).machine.l1_bytes == {"blackhole": 1572864, "wormhole_b0": 1499136}[arch]
    monkeypatch.setattr(handle, "l1_size_per_core", lambda: 1 << 20, raising=False)
    assert Device.of(handle).machine.l1_bytes == 1 << 20


@pytest.mark.parametrize("board", ["n150", "n300", "p150"])
def test_the_emulator_has_every_chip_of_the_planner(board: str) -> None:
    assert set(emulator_chips) == {chip.name for chip in planner.chips()}
    chip, handle = planner.find_chip(board), emulator_library.open_mesh(1, board)
    made = Device.of(handle)
    assert handle.l1_size_per_core() == made.machine.l1_bytes == chip.l1_bytes
    assert (made.machine.grid, made.machine.dram_banks, made.arch) == (chip.compute_grid, chip.dram_banks, chip.arch)
    model = handle.chip
    assert (len(model.noc_x), len(model.noc_y)) == (len(model.core_x), len(model.core_y)) == chip.compute_grid
    assert len(set(model.bank_cores)) == chip.dram_banks


def experts_on(device: Device) -> DeviceExperts:
    def tiles(*shape: int) -> Any:
        return tensors.empty(shape, "bfloat16", "TILE", device)

    mapping = tensors.empty((1, E), "int32", "ROW_MAJOR", device)
    return DeviceExperts(
        device,
        E,
        H,
        I,
        tenstorrent.ExpertFormats(),
        Placement.uniform(E, 1),
        tiles(E, H, I),
        tiles(E, H, I),
        tiles(E, I, H),
        mapping,
    )


def call_on(device: Device, T: int, out: str | None = "bfloat16") -> dict[str, Any]:
    """Arguments of moe, in new buffers."""
    ids = tensors.empty((T, K), "int32", "ROW_MAJOR", device)
    weights = tensors.empty((T, K), "float32", "ROW_MAJOR", device)
    return {
        "hidden": tensors.empty((T, H), "bfloat16", "ROW_MAJOR", device),
        "routing": tenstorrent.DeviceRouting(ids, weights),
        "out": None if out is None else tensors.empty((T, H), out, "TILE", device),
    }


def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch as at a first call."""

    def launch(self: Launcher, given: Any, scalars: Any) -> None:
        runtime.library().generic_op(list(given.values()), self.descriptor(given, scalars))

    monkeypatch.setattr(Launcher, "__call__", launch)


def test_a_chip_gets_the_arguments_of_each_call(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer, T and accumulate change from call to call; two layers share the programs."""
    layers = [experts_on(device), experts_on(device)]
    kinds = [(20, "bfloat16"), (32, "bfloat16"), (1, "float32"), (7, "float32"), (20, "bfloat16")]
    calls = [(layers[i % 2], call_on(device, T, out), i % 4 == 3) for i, (T, out) in enumerate(kinds)]
    for experts, call, accumulate in calls * 2:
        tenstorrent.moe(call["hidden"], call["routing"], experts, out=call["out"], accumulate=accumulate)
    handle = device.handle
    got, entries = list(handle.launched), handle.num_program_cache_entries()
    assert entries == 4  # down has one for each format of the output
    handle.launched.clear()
    anew(monkeypatch)
    for experts, call, accumulate in calls * 2:
        tenstorrent.moe(call["hidden"], call["routing"], experts, out=call["out"], accumulate=accumulate)
    assert got == handle.launched and len(got) == 30
    assert all(own for program in got for _, own in program), "every core has its arguments"
    assert handle.num_program_cache_entries() == entries


def test_two_sizes_of_silu_mul_keep_their_own_arguments(device: Device) -> None:
    """Only the per-core arguments of their programs differ: the first and the last tile of each core."""
    programs = programs_of(device, Sizes(1, 1, 1, 32, 768))
    for bound in (256, 1024, 256, 1024):
        form = (programs.rows(bound), 768), "bfloat16", "TILE"
        programs.silu_mul(tensors.empty(*form, device), tensors.empty(*form, device), bound)
        for _, own in device.handle.launched[-1]:
            assert max(last for _, last in own.values()) == programs.rows(bound) // 32 * 24
    assert device.handle.num_program_cache_entries() == 2


def test_programs_with_other_arguments_of_a_core_have_another_hash(device: Device) -> None:
    """gate_up and down have the same compile-time arguments interleaved and banked where the runs are equally long."""
    chip = next(chip for chip in emulator_chips.values() if chip.arch == str(device.arch))
    machine = planner.Machine(
        grid=chip.grid, l1_bytes=chip.l1_size, dram_banks=chip.dram_banks, bank_cores=list(chip.bank_cores)
    )
    device.machine = machine
    tensor = tensors.empty((32, 32), "bfloat16", "TILE", device)
    names = "topk_ids topk_weights device_expert_mapping num_routed_tokens routed_tokens routed_token_weights hidden"
    given = dict.fromkeys([*names.split(), "weight_0", "weight_1", "activations", "gate", "up", "out"], tensor)
    found: dict[int, list[Any]] = {}
    told = set()
    for H, I, layout, bound in product((64, 512), (64, 96, 768), ("interleaved", "banked"), (32, 64, 1024)):
        programs = LayerPrograms(device, Sizes(4, 4, 1, H, I, f"bfloat16,layout={layout}"))
        for name in ("routing", "gate_up", "project", "down", "silu_mul"):
            plan = programs.plan(name, bound)
            made = Launcher(plan, device.handle).descriptor(given, {"T": 1, "token_tiles": 1, "accumulate": 0})
            own = [kernel.runtime_args for kernel in made.kernels]
            of_cores = (arg for kernel in plan.kernels for args in kernel.args.values() for arg in args)
            assert all(isinstance(arg, int) for arg in of_cores), "placeholders have no hash of their own"
            assert found.setdefault(made.custom_program_hash, own) == own, (name, H, I, layout, bound)
            made.custom_program_hash = None
            told.add(ttnn_host.compute_program_descriptor_hash(made))
    assert len(told) < len(found), "the sizes have such programs"
    assert all(0 <= one < 2**64 for one in found), "ttnn keeps it in 64 bits"


def test_a_program_that_ttnn_forgot_is_made_again(device: Device) -> None:
    experts, call = experts_on(device), call_on(device, 20)
    for _ in range(3):
        tenstorrent.moe(call["hidden"], call["routing"], experts, out=call["out"])
    device.handle.clear_program_cache()
    for _ in range(2):
        tenstorrent.moe(call["hidden"], call["routing"], experts, out=call["out"])
    launched = device.handle.launched
    assert launched == launched[:3] * 5 and device.handle.num_program_cache_entries() == 3


def test_a_later_call_makes_no_descriptor_and_no_check(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, calls = experts_on(device), [call_on(device, 20) for _ in range(3)]
    tenstorrent.moe(calls[0]["hidden"], calls[0]["routing"], experts, out=calls[0]["out"])

    def never(*_: Any) -> None:
        raise AssertionError("of a first call only")

    monkeypatch.setattr(Launcher, "descriptor", never)
    monkeypatch.setattr(tensors, "check", never)
    monkeypatch.setattr(ttnn_host, "empty", never)
    for call in calls:
        tenstorrent.moe(call["hidden"], call["routing"], experts, out=call["out"])
    assert len(device.handle.launched) == 12


def test_a_profile_names_the_programs_of_every_call(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor of a later call has no kernels' files."""
    experts, call, names = experts_on(device), call_on(device, 20), list[str]()
    launch, operation = ttnn_host.generic_op, SimpleNamespace(python_fully_qualified_name="ttnn.generic_op")

    def hooked(*args: Any) -> Any:
        names.append(profile._name(operation, args))
        return launch(*args)

    monkeypatch.setattr(ttnn_host, "generic_op", hooked)
    for _ in range(2):
        tenstorrent.moe(call["hidden"], call["routing"], experts, out=call["out"])
    assert names == ["routing", "gate_up", "down"] * 2
    others = SimpleNamespace(custom_program_hash=None)
    assert profile._name(operation, ([], others)) == "ttnn.generic_op"


def test_what_fails_twice_is_raised(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, call = experts_on(device), call_on(device, 20)
    tenstorrent.moe(call["hidden"], call["routing"], experts, out=call["out"])

    def broken(*_: Any) -> None:
        raise RuntimeError("the card is gone")

    with monkeypatch.context() as patch:
        patch.setattr(ttnn_host, "generic_op", broken)
        with pytest.raises(RuntimeError, match="the card is gone"):
            tenstorrent.moe(call["hidden"], call["routing"], experts, out=call["out"])
    tenstorrent.moe(call["hidden"], call["routing"], experts, out=call["out"])
    assert device.handle.launched[:3] == device.handle.launched[3:]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"shape": (20, H + 32)}, "hidden has the wrong shape"),
    "as many numbers": ({"shape": (10, 2 * H)}, "hidden has the wrong shape"),
    "dtype": ({"dtype": ttnn_host.float32}, "hidden has the wrong dtype"),
    "layout": ({"layout": "TILE"}, "hidden has the wrong layout"),
    "host": ({"device": None}, "hidden is not on a device"),
    "another device": ({"device": ttnn_host.Device()}, "hidden is on another device"),
    "L1": ({"memory_config": "L1"}, "hidden is not interleaved in DRAM"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_tensor_is_refused_after_right_ones(device: Device, name: str) -> None:
    change, message = WRONG[name]
    experts, call = experts_on(device), call_on(device, 20)
    for _ in range(2):
        tenstorrent.moe(call["hidden"], call["routing"], experts, out=call["out"])
    form = {"shape": (20, H), "dtype": ttnn_host.bfloat16, "layout": "ROW_MAJOR", "device": device.handle}
    wrong = ttnn_host.Tensor(**{**form, "memory_config": "DRAM", **change})
    launched = len(device.handle.launched)
    with pytest.raises(ContractError, match=re.escape(message)):
        tenstorrent.moe(wrong, call["routing"], experts, out=call["out"])
    with pytest.raises(ContractError, match="out is not a ttnn tensor"):
        tenstorrent.moe(call["hidden"], call["routing"], experts, out=torch.zeros(20, H))
    with pytest.raises(ContractError, match="needs an out|accumulate=True"):
        tenstorrent.moe(call["hidden"], call["routing"], experts, accumulate=True)
    assert len(device.handle.launched) == launched


def test_the_benchmark(device: Device) -> None:
    """Times of the host code before and after, with its gate; small."""
    host = script("tenstorrent_host")
    row = host.measure(device, host.Sizes(E=E, E_local=E, K=K, H=H, I=I), T=20, rounds=2, calls=3)
    assert row.before_us["layer"] > row.after_us["layer"] > 0 and row.ratio > 1
