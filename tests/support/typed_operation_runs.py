"""Building cpp/ttnn_ops, and running an operator both ways: as a typed operation, and by the Python launch path."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nanobind
import pytest

import ttnn_descriptors
from paths import ROOT
from ttnn_moe import _planner as planner
from ttnn_moe.sizes import ceil_div
from ttnn_moe.tenstorrent import runtime
from ttnn_moe.tenstorrent.device import Device
from ttnn_moe.tenstorrent.launch import Launcher
from ttnn_moe.tenstorrent.layer_sizes import Sizes
from ttnn_moe.tenstorrent.programs import LayerPrograms
from ttnn_moe.tenstorrent.weight_formats import ComputeConfig
from typed_operation_cases import BOUND, T

CHIPS = {"blackhole": ((13, 10), 1572864), "wormhole_b0": ((8, 7), 1499136)}
REASON = "the typed operations are compiled with {0}: none here"


def tool(*names: str) -> str:
    """Path of a program, beside this Python or on PATH."""
    for name in names:
        found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        if found:
            return found
    pytest.skip(REASON.format(" or ".join(names)))


def configure(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        tool("cmake"),
        "-S",
        str(ROOT),
        "-B",
        str(folder),
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DCMAKE_CXX_COMPILER={os.environ.get('CXX') or tool('g++', 'c++', 'clang++')}",
        "-DCMAKE_BUILD_TYPE=Debug",
        "-DCMAKE_UNITY_BUILD=ON",  # half of the time
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dnanobind_DIR={nanobind.cmake_dir()}",
        "-DTTNN_MOE_WITH_TTNN=ON",
        *options,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def load(folder: Path, name: str) -> Any:
    (path,) = folder.rglob(f"{name}.*.so")
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


class On:
    """A chip of the stand-in, the tensors of one layer on it, and both ways to run an operator."""

    def __init__(self, ops: Any, stand_in: Any, arch: str, sizes: Sizes, l1_bytes: int = 0):
        self.grid, l1 = CHIPS[arch]
        l1_bytes = l1_bytes or l1
        self.ops, self.stand_in, self.sizes = ops, stand_in, sizes
        self.chip = stand_in.Device(arch, self.grid, l1_bytes)
        self.settings: dict[str, Any] = {}  # of every call of an operation
        self._on_cores(arch, self.grid, l1_bytes)

    def _on_cores(self, arch: str, grid: tuple[int, int], l1_bytes: int) -> None:
        machine = planner.Machine(grid=grid, l1_bytes=l1_bytes, dram_banks=self.chip.dram_banks)
        self.device = Device(self, 1, arch, machine)
        self.programs = LayerPrograms(self.device, self.sizes)

    def on_sub_device(self, x: int, y: int) -> None:
        """Run on the first x columns and y rows of the chip: a sub-device, and what the Python path plans for it."""
        self.settings["subdevice_id"] = self.chip.add_sub_device([(0, 0, x - 1, y - 1)])
        self._on_cores(self.device.arch, (x, y), self.device.machine.l1_bytes)

    def compute_config(self, **settings: Any) -> Any:
        config = self.stand_in.DeviceComputeKernelConfig()
        for name, value in settings.items():
            setattr(config, name, value)
        return config

    @property
    def products(self) -> dict[str, Any]:
        """Settings of gate_up and down: fidelity and DST as the sizes say."""
        compute = self.sizes.compute
        if compute == ComputeConfig():
            return self.settings
        fidelity = getattr(self.stand_in.MathFidelity, compute.math_fidelity)
        config = self.compute_config(math_fidelity=fidelity, fp32_dest_acc_en=compute.fp32_dest_acc_en)
        return {"compute_kernel_config": config, **self.settings}

    def worker_core_from_logical_core(self, core: ttnn_descriptors.CoreCoord) -> ttnn_descriptors.CoreCoord:
        return ttnn_descriptors.CoreCoord(*self.chip.worker_core(*core))

    def tensor(self, shape: tuple[int, ...], dtype: str = "bfloat16", tiled: bool = True, **place: Any) -> Any:
        place = {"device": self.chip} | place
        return self.stand_in.tensor(
            shape=list(shape), dtype=getattr(self.stand_in.DataType, dtype), tiled=tiled, **place
        )

    def rows(self, *shape: int, dtype: str = "int32") -> Any:
        return self.tensor(shape, dtype, tiled=False)

    def routing(self, bound: int) -> dict[str, Any]:
        made = {name: self.tensor(*_form(form)) for name, form in self.programs.buffers(bound).items()}
        del made["activations"]
        return {**made, "device_expert_mapping": self.rows(1, self.sizes.E_local)}

    def weight(self, name: str) -> Any:
        s = self.sizes
        if name == "down":
            return self.tensor((s.E_local, s.H // 32, s.I, 32), s.formats.down)
        return self.tensor((s.E_local, s.I // 32, s.H, 32), s.formats.gate_up)

    def activations(self, bound: int) -> Any:
        return self.tensor((self.programs.rows(bound), self.sizes.I))

    def in_python(self, name: str, bound: int, tensors: dict[str, Any], scalars: dict[str, int], out="bfloat16") -> Any:
        """The descriptor of the Python launch path."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime, "_emulated", ttnn_descriptors)
            return Launcher(self.programs.plan(name, bound, out), self).without_hash(tensors, scalars)

    # Each runs the typed operation; returns the output and what the Python path makes of the same tensors.

    def route(self, T: int, bound: int, **more: Any) -> tuple[Any, Any]:
        s = self.sizes
        given = {
            "topk_ids": self.rows(T, s.K),
            "topk_weights": self.rows(T, s.K, dtype="float32"),
            "device_expert_mapping": self.rows(1, s.E_local),
        }
        made = self.ops.moe_routing(**given, num_experts=s.E, **self.settings, **more)
        names = ("num_routed_tokens", "routed_tokens", "routed_token_weights")
        return made, self.in_python("routing", bound, {**given, **dict(zip(names, made, strict=True))}, {"T": T})

    def gate_up(self, T: int, bound: int, up: bool = True, **more: Any) -> tuple[Any, Any]:
        routed = self.routing(bound)
        routed.pop("routed_token_weights")
        given = {"hidden": self.rows(T, self.sizes.H, dtype="bfloat16"), **routed}
        gate, second = self.weight("gate"), self.weight("up") if up else None
        more |= self.products
        out = self.ops.moe_gate_up(**given, gate=gate, up=second, experts_per_token=self.sizes.K, **more)
        weights = {"weight_0": gate} | ({"weight_1": second} if up else {})
        return out, self.in_python("gate_up" if up else "project", bound, {**given, **weights, "out": out}, {})

    def silu_mul(self, rows: int) -> tuple[Any, Any]:
        given = {name: self.tensor((rows, self.sizes.I)) for name in ("gate", "up")}
        out = self.ops.moe_silu_mul(**given, **self.settings)
        return out, self.in_python("silu_mul", rows, {**given, "out": out}, {})

    def down(self, T: int, bound: int, out_format: str = "bfloat16", accumulate: bool = False, **more: Any) -> Any:
        given = {"activations": self.activations(bound), **self.routing(bound)}
        weight = self.weight("down")
        more |= self.products
        if accumulate:
            more["output_tensor"] = self.tensor((T, self.sizes.H), out_format)
        out = self.ops.moe_down(
            **given,
            weight=weight,
            experts_per_token=self.sizes.K,
            num_tokens=T,
            accumulate=accumulate,
            output_dtype=getattr(self.stand_in.DataType, out_format),
            **more,
        )
        scalars = {"token_tiles": ceil_div(T, 32), "accumulate": int(accumulate)}
        return out, self.in_python("down", bound, {**given, "weight_0": weight, "out": out}, scalars, out_format)


def _form(form: Any) -> tuple[Any, ...]:
    shape, dtype, layout = form
    return shape, dtype, layout == "TILE"


def arguments(on: On, operator: str) -> dict[str, Any]:
    s = on.sizes
    if operator == "routing":
        return {
            "topk_ids": on.rows(T, s.K),
            "topk_weights": on.rows(T, s.K, dtype="float32"),
            "num_experts": s.E,
            "device_expert_mapping": on.rows(1, s.E_local),
        }
    if operator == "silu_mul":
        return {name: on.tensor((64, s.I)) for name in ("gate", "up")}
    routed = on.routing(BOUND)
    if operator == "gate_up":
        routed.pop("routed_token_weights")
        hidden = on.rows(T, s.H, dtype="bfloat16")
        return {"hidden": hidden, **routed, "gate": on.weight("gate"), "up": on.weight("up"), "experts_per_token": s.K}
    given = {"activations": on.activations(BOUND), **routed, "weight": on.weight("down")}
    return {**given, "experts_per_token": s.K, "num_tokens": T}
