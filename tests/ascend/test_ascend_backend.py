"""The probe of the Ascend backend on machines of many kinds, each a small module in torch_npu's place."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paths import ROOT
from processes import run_python
from ttnn_moe import registry
from ttnn_moe.ascend import groups, operators
from ttnn_moe.ascend.backend import AscendBackend
from ttnn_moe.errors import BackendUnavailable


def torch_npu(names: list[str], without: str = "") -> Any:
    """A torch_npu that sees devices of these names and lacks one operator."""
    device = types.SimpleNamespace(
        is_available=lambda: bool(names), device_count=lambda: len(names), get_device_name=lambda i: names[i]
    )
    held = {name: None for name in operators.LAYER if name != without}
    return types.SimpleNamespace(npu=device, **held)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    def become(module: Any, installed: bool = True) -> None:
        def load() -> Any:
            if isinstance(module, Exception):
                raise module
            return module

        monkeypatch.setattr(operators, "installed", lambda: installed)
        monkeypatch.setattr(operators, "load", load)

    return become


def test_a_910b_is_available(machine) -> None:
    machine(torch_npu(["Ascend910B3", "Ascend910B3"]))
    found = AscendBackend.probe()
    assert found.available and found.devices == ("Ascend910B3", "Ascend910B3")


@pytest.mark.parametrize(
    "module, installed, words",
    [
        (None, False, "torch_npu is not installed"),
        (ImportError("libhccl.so: cannot open shared object file"), True, "libhccl.so"),
        (torch_npu(["Ascend910B3"], operators.ROUTE), True, "has no npu_moe_init_routing_v2"),
        (torch_npu([]), True, "no NPU is here"),
        (torch_npu(["Ascend310P3"]), True, "here is Ascend310P3"),
    ],
    ids=["not installed", "no CANN", "old", "no device", "another chip"],
)
def test_any_other_machine_is_told_what_it_lacks(machine, module: Any, installed: bool, words: str) -> None:
    machine(module, installed)
    found = AscendBackend.probe()
    assert not found.available and words in found.reason


def test_a_torch_npu_for_another_torch_is_named(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(torch_npu(["Ascend910B3"]))
    ours = ".".join(torch.__version__.split(".")[:2])
    for version, available in ((f"{ours}.7.post2", True), ("2.1.0", False)):
        monkeypatch.setattr(operators.metadata, "version", lambda _, version=version: version)
        found = AscendBackend.probe()
        assert found.available is available
    assert "is for torch 2.1" in found.reason and torch.__version__ in found.reason and "torch==2.1.*" in found.remedy


def test_asking_for_it_here_names_what_is_missing() -> None:
    if registry.probe("ascend").available:
        pytest.skip("an NPU is here")
    with pytest.raises(BackendUnavailable, match="torch_npu|NPU"):
        registry.resolve("ascend")


def test_nothing_imports_torch_npu_before_it_is_asked_for(tmp_path: Path) -> None:
    """A torch_npu that cannot be imported is beside the package: only the probe of the backend touches it."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    code = (
        "import sys, ttnn_moe, ttnn_moe.cli, ttnn_moe.ascend.backend, ttnn_moe.parallel;"
        "assert 'torch_npu' not in sys.modules;"
        "print(ttnn_moe.registry.probe('ascend').reason); print(ttnn_moe.registry.resolve())"
    )
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = run_python("-c", code, PYTHONPATH=path, TORCH_DEVICE_BACKEND_AUTOLOAD="0", CUDA_VISIBLE_DEVICES="")
    reason, chosen = done.stdout.splitlines()
    assert "libhccl.so" in reason and chosen == "reference"


@pytest.fixture
def alone(tmp_path: Path):
    """A process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_process_group_without_hccl_is_refused(alone: None) -> None:
    with pytest.raises(BackendUnavailable, match="has no HCCL.*all_to_all"):
        AscendBackend().group_name(None)


def test_the_exchange_has_a_process_group_for_itself(alone: None) -> None:
    named = {"_hccl": lambda self, group: types.SimpleNamespace(get_hccl_comm_name=lambda rank: group.group_name)}
    backend = type("Named", (AscendBackend,), named)()
    name = backend.group_name(None)
    assert name != dist.group.WORLD.group_name and backend.group_name(None) == name
    mine = dist.new_group()
    other = backend.group_name(mine)  # the layers of mine tell each other their sizes over mine
    assert len({other, mine.group_name, name}) == 3 and backend.group_name(mine) == other
    assert groups.global_bs(mine) is None
    groups.take_global_bs(mine, 4096)
    assert groups.global_bs(mine) == 4096 and groups.global_bs(None) is None
