"""The Tenstorrent backend on emulated devices: the runs of tests/support/tenstorrent_runs.py, on both architectures."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from own_registry import own_registry
from tenstorrent_names import MESH_NAMES, NAMES
from ttnn_moe.tenstorrent.emulator.run import SEED_VARIABLE
from ttnn_moe.tenstorrent.runtime import DEVICE

# These look at ttnn itself: its tensors, its files.
OF_TTNN = {"ttnn_tensors", "bad_input_is_refused", "weights_on_disk"}
OF_TTNN |= {"model_weights_on_disk", "mesh_model_weights_on_disk"}
# Sizes that are not whole tiles: refused before a device is looked at (tests/tenstorrent/test_tenstorrent_host.py).
REFUSED = {"case_odd_sizes", "case_few_with_a_bound"}
LONG = {
    *"random_sizes harvested_grids routing_4096 windows_and_long_chains qwen3_1 qwen3_32 qwen3_128".split(),
    *"model_qwen3_layer mesh_qwen3 case_tokens_600 more_tokens_than_a_program_takes mesh_uniform".split(),
    *"mesh_model_answers mesh_model_logits".split(),
}

needs_planner = pytest.mark.skipif(
    importlib.util.find_spec("ttnn_moe._planner") is None, reason="ttnn_moe._planner is not built: plans come from it"
)


# The cases of the contract on Wormhole that run without --long; the kernels are Blackhole's.
QUICK_ON_N150 = {"case_plain", "case_duplicates", "case_nan_and_inf_tokens"}
# Large ones that show no more on Wormhole than the smaller ones do, and a mesh no more than a chip.
LARGE = {"model_qwen3_layer", "model_eight_bit_keys_and_draws", "qwen3_128", "random_sizes", "mesh_qwen3"}
LARGE |= {"model_answers"}
# A Blackhole mesh differs from a Wormhole mesh in what one chip shows.
ON_N150 = {"mesh_qwen3", "mesh_model_answers"}


def runs() -> list:
    kept = [name for name in [*NAMES, *MESH_NAMES] if name not in OF_TTNN | REFUSED]
    params = []
    for chip in ("p150", "n150"):
        for name in kept:
            again = chip == "n150" and (name in LARGE or name.startswith("case_") and name not in QUICK_ON_N150)
            marks = [pytest.mark.slow] if name in LONG else []
            marks += [pytest.mark.long] if again or (chip == "p150" and name in ON_N150) else []
            params.append(pytest.param(chip, name, marks=marks))
    return params


@needs_planner
@pytest.mark.parametrize("chip, name", runs())
def test_run(chip, name, monkeypatch):
    monkeypatch.setenv(DEVICE, f"emulator:{chip}")
    monkeypatch.setenv("TTNN_MOE_TT_CACHE", "off")
    import tenstorrent_runs
    from ttnn_moe import tenstorrent
    from ttnn_moe.tenstorrent import programs

    monkeypatch.setattr(programs, "MAX_T", programs.MAX_T)  # a run may change it
    tenstorrent.close_device()
    torch.manual_seed(0)
    try:
        with own_registry():
            {**tenstorrent_runs.RUNS, **tenstorrent_runs.MESH_RUNS}[name]()
    finally:
        tenstorrent.close_device()


@needs_planner
def test_the_devices_of_one_process_are_one(monkeypatch):
    from ttnn_moe import BackendUnavailable, tenstorrent

    monkeypatch.delenv(DEVICE, raising=False)
    tenstorrent.close_device()
    device = tenstorrent.open_device(2, device="emulator:n150")
    assert (device.arch, device.D) == ("wormhole_b0", 2)
    with pytest.raises(BackendUnavailable, match="another mesh is open"):
        tenstorrent.open_device(1, device="emulator")
    tenstorrent.close_device()


@needs_planner
def test_a_device_that_was_opened_is_found_whatever_was_known_before(monkeypatch):
    from ttnn_moe import registry, tenstorrent

    monkeypatch.delenv(DEVICE, raising=False)
    tenstorrent.close_device()
    before = registry.probe("tenstorrent")
    tenstorrent.open_device(device="emulator")
    assert registry.probe("tenstorrent").available
    tenstorrent.close_device()
    assert registry.probe("tenstorrent") == before


@needs_planner
def test_an_unknown_chip_is_refused():
    from ttnn_moe import BackendUnavailable, tenstorrent

    tenstorrent.close_device()
    with pytest.raises(BackendUnavailable, match="no such chip to emulate"):
        tenstorrent.open_device(device="emulator:n900")


@needs_planner
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [(DEVICE, "emulator:zz", "no such chip to emulate: 'zz'"), (SEED_VARIABLE, "many", "is no seed")],
)
def test_what_the_emulator_cannot_take_is_no_backend(monkeypatch, name, value, said):
    """So `auto` takes another, and commands end with exit code 2."""
    from ttnn_moe import tenstorrent
    from ttnn_moe.tenstorrent.device import probe

    monkeypatch.setenv(DEVICE, "emulator")
    monkeypatch.setenv(name, value)
    tenstorrent.close_device()
    found = probe()
    assert not found.available and said in found.reason and found.remedy
