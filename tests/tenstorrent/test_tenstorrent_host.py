"""The Tenstorrent backend where there is no device: what it says is missing, and what it refuses."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ttnn_moe
from ttnn_moe import BackendUnavailable, ContractError, Problem, Routing, registry
from ttnn_moe.selfcheck.edges import CASES
from ttnn_moe.sources import kernel_path
from ttnn_moe.tenstorrent import device as devices
from ttnn_moe.tenstorrent import sfpi
from ttnn_moe.tenstorrent.backend import TenstorrentBackend
from ttnn_moe.tenstorrent.runtime import DEVICE


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """ttnn and the planner look as if they were here, and there is no card; ttnn's folder."""
    real = importlib.util.find_spec

    class Spec:
        origin = str(tmp_path / "ttnn" / "__init__.py")

    def find(name: str, package: str | None = None) -> object:
        return Spec() if name in ("ttnn", "ttnn_moe._planner") else real(name, package)

    monkeypatch.setattr(devices.importlib.util, "find_spec", find)
    monkeypatch.setattr(devices, "CARDS", tmp_path / "dev")
    monkeypatch.setattr(sfpi, "SYSTEM", tmp_path / "opt")
    for name in (devices.SIMULATOR, "TT_METAL_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "ttnn"


def _compiler(root: Path) -> Path:
    return root / "runtime" / "sfpi" / sfpi.COMPILER


def test_without_a_card(installed: Path) -> None:
    found = devices.probe()
    assert not found.available and "no Tenstorrent device" in found.reason
    assert devices.SIMULATOR in found.remedy
    with pytest.raises(BackendUnavailable, match="no Tenstorrent device"):
        devices.open_device()


@pytest.mark.parametrize("name", ["emulatr", "cuda", "n150"])
def test_a_name_that_is_none_opens_no_card(name: str, installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slip in the emulator's name."""
    (installed.parent / "dev").mkdir()
    (installed.parent / "dev" / "0").touch()
    monkeypatch.setattr(devices, "_compiler", lambda: None)
    assert devices.probe("").available
    words = f"no Tenstorrent device is named '{name}'; to fix it: name emulator or emulator:n150"
    with pytest.raises(BackendUnavailable, match=words):
        devices.open_device(device=name)
    monkeypatch.setenv(DEVICE, name)
    assert not devices.probe().available


@pytest.mark.parametrize("name", [3, [], b"emulator", True, torch.device("cpu")], ids=str)
def test_what_is_no_name_of_a_device_is_refused(name: Any) -> None:
    with pytest.raises(ContractError, match="device is no name; got device=.*; expected emulator or"):
        devices.open_device(device=name)


def test_without_the_simulator_that_is_named(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(devices.SIMULATOR, "/nowhere/libttsim.so")
    found = devices.probe()
    assert not found.available and "/nowhere/libttsim.so, and nothing is there" in found.reason


def test_without_a_compiler(installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "libttsim.so"
    library.touch()
    monkeypatch.setenv(devices.SIMULATOR, str(library))
    found = devices.probe()
    assert not found.available and str(_compiler(installed)) in found.reason
    assert found.remedy == "python -m ttnn_moe.tenstorrent.sfpi"
    _compiler(installed).parent.mkdir(parents=True)
    _compiler(installed).touch()
    assert devices.probe().available
    assert devices.probe().devices == (f"simulator {library}",)


def test_with_a_card(installed: Path) -> None:
    _compiler(installed).parent.mkdir(parents=True)
    _compiler(installed).touch()
    devices.CARDS.mkdir()
    (devices.CARDS / "0").touch()
    assert devices.probe().devices == ("card 0",)


def test_without_ttnn(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        devices.importlib.util, "find_spec", lambda name, package=None: None if name == "ttnn" else real(name, package)
    )
    found = devices.probe()
    assert not found.available and found.reason == "ttnn is not installed"
    assert "tenstorrent" in found.remedy


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float16}, "bfloat16"),
        ({"dtype": torch.float32}, "bfloat16"),
        ({"H": 72}, "multiples of 32"),
        ({"I": 40}, "multiples of 32"),
        ({"weight_format": "int4_24"}, "dense weights"),
        ({"device": "cuda"}, "from the CPU"),
    ],
    ids=str,
)
def test_problems_that_it_does_not_run(change: dict[str, object], reason: str) -> None:
    sizes = {"T": 4, "E": 8, "K": 2, "H": 64, "I": 64, "dtype": torch.bfloat16}
    assert TenstorrentBackend().why_not(Problem(**sizes)) is None  # type: ignore[arg-type]
    said = TenstorrentBackend().why_not(Problem(**{**sizes, **change}))  # type: ignore[arg-type]
    assert said is not None and reason in said


def test_the_case_of_odd_sizes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.name == "odd_sizes")
    x = case.make(torch.bfloat16)
    problem = Problem.of(case.T, case.K, x.experts, torch.bfloat16)
    assert "multiples of 32" in str(TenstorrentBackend().why_not(problem))


def test_what_is_no_tensor_is_refused() -> None:
    x = CASES[0].make(torch.bfloat16)
    routing = Routing.from_topk(x.ids, x.weights, x.experts.E)
    with pytest.raises(ContractError, match="hidden is no tensor; got ndarray"):
        ttnn_moe.moe(x.hidden.float().numpy(), routing, x.experts)  # type: ignore[arg-type]


def test_it_is_registered() -> None:
    assert registry._class("tenstorrent") is TenstorrentBackend


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """device_kernels/common/fp32.hpp, compiled for this machine."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("fp32")
    source = folder / "fp32.cpp"
    source.write_text(
        f'#include "{kernel_path("device_kernels", "common", "fp32.hpp")}"\n'
        'extern "C" void add(const uint32_t* a, const uint32_t* b, uint32_t* c, int n) {\n'
        "    for (int i = 0; i < n; i++) c[i] = moe::fp32_add(a[i], b[i]);\n}\n"
        'extern "C" void to_bf16(const uint32_t* a, uint16_t* c, int n) {\n'
        "    for (int i = 0; i < n; i++) c[i] = moe::bf16_of_fp32(a[i]);\n}\n"
    )
    library = folder / "fp32.so"
    subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def _bit_patterns(n: int, seed: int) -> np.ndarray:
    """Any fp32 bit patterns; and some whose exponents are close, or special."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32)
    near = rng.integers(0x3F000000, 0x40800000, n, dtype=np.uint64).astype(np.uint32)
    near |= (rng.integers(0, 2, n).astype(np.uint32)) << 31
    special = np.array([0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x3F800000], np.uint32)
    special = np.concatenate([special, special | np.uint32(1 << 31)])
    return np.concatenate([bits, near, bits & np.uint32(0x80FFFFFF), np.tile(special, n // len(special))])


def test_fp32_sums_on_the_risc_v_cores_are_ieee(fp32: ctypes.CDLL) -> None:
    a, b = _bit_patterns(200_000, 1), _bit_patterns(200_000, 2)
    np.random.default_rng(3).shuffle(b[-100_000:])
    got = np.empty_like(a)
    fp32.add(*(x.ctypes.data_as(ctypes.c_void_p) for x in (a, b, got)), len(a))
    with np.errstate(all="ignore"):
        want = a.view(np.float32) + b.view(np.float32)
    nan = np.isnan(want)
    assert np.array_equal(np.isnan(got.view(np.float32)), nan)
    assert np.array_equal(got[~nan], want.view(np.uint32)[~nan])


def test_bf16_rounding_on_the_risc_v_cores_is_torchs(fp32: ctypes.CDLL) -> None:
    a = _bit_patterns(100_000, 4)
    got = np.empty(len(a), np.uint16)
    fp32.to_bf16(a.ctypes.data_as(ctypes.c_void_p), got.ctypes.data_as(ctypes.c_void_p), len(a))
    values = torch.from_numpy(a.view(np.float32).copy())
    want = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    nan = torch.isnan(values).numpy()
    assert np.array_equal(got[~nan], want[~nan])
    assert np.isnan((got[nan].astype(np.uint32) << 16).view(np.float32)).all()
