"""Where fp32 sums stay fp32 when they are read again: on every card, and in the emulator of every chip."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import pytest
import torch

from ttnn_moe.selfcheck.bounds import BOUND, token_errors
from ttnn_moe.tenstorrent import device as devices
from ttnn_moe.tenstorrent import runtime
from ttnn_moe.tenstorrent.all_reduce import partial_dtype
from ttnn_moe.tenstorrent.emulator import library

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ttnn_moe._planner") is None, reason="ttnn_moe._planner is not built: plans come from it"
)


@dataclass
class Handle:
    """A device of ttnn's."""

    name: str

    def arch(self) -> str:
        return f"Arch.{self.name.upper()}"

    def compute_with_storage_grid_size(self):
        return library.open_mesh(1).compute_with_storage_grid_size()

    def dram_grid_size(self):
        return library.open_mesh(1).dram_grid_size()

    def get_num_devices(self) -> int:
        return 1


@pytest.mark.parametrize("simulator", ["", "/path/libttsim.so"])
@pytest.mark.parametrize("arch", devices.ARCHITECTURES)
def test_only_the_simulator_of_wormhole_lacks_it(arch, simulator, monkeypatch):
    monkeypatch.setenv(devices.SIMULATOR, simulator)
    there = devices.Device.of(Handle(arch))
    lacks = arch == "wormhole_b0" and simulator != ""
    assert there.machine.unpack_to_dest is not lacks
    assert partial_dtype(there) == ("bfloat16" if lacks else "float32")


@pytest.mark.parametrize("chip", library.CHIPS)
def test_the_emulator_has_it_whatever_simulator_is_named(chip, monkeypatch):
    monkeypatch.setenv(devices.SIMULATOR, "/path/libttsim.so")
    there = devices.Device.of(library.open_mesh(1, chip))
    assert there.machine.unpack_to_dest
    assert partial_dtype(there) == "float32"


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("chip", library.CHIPS)
def test_64_experts_a_token(chip, direct, monkeypatch):
    """A token's sum is read again 64 times. Cut to TF32 each time, it leaves the bound on either chip."""
    from tenstorrent_setup import Layer, OnDevice
    from ttnn_moe import _planner

    monkeypatch.setattr(runtime, "_emulated", library)
    there = devices.Device.of(library.open_mesh(1, chip))
    there.machine = _planner.Machine(
        grid=(4, 2), l1_bytes=there.machine.l1_bytes, unpack_to_dest=direct, dram_banks=there.machine.dram_banks
    )
    layer = Layer.make(T=4, E=64, K=64, H=64, I=32)
    on = OnDevice(layer, there)
    routed = on.route()
    out = on.out(dtype=torch.float32)
    on.programs.down(on.programs.gate_up(on.hidden, routed, on.gate, on.up), routed, on.down, out, False)
    error = float(token_errors(on.back(out), layer.want()).max())
    assert error < BOUND[torch.bfloat16] / 3 if direct else error > BOUND[torch.bfloat16], f"{error:.1e}"
