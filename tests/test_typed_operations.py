"""cpp/ttnn_ops, built with the project's own CMake against tests/ttnn_stand_in: each operation makes the program that
the Python launch path makes, keeps one program for every T, and refuses what it cannot run.

The stand-in declares the API that they use and no more. TTNN_MOE_TTNN, the folder of an installed ttnn package, has the
functions looked up in its libraries; TTNN_MOE_TT_METAL, a tt-metal checkout or such a folder, has every name looked up
in its sources.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ttnn_descriptors

planner = pytest.importorskip("ttnn_moe._planner", reason="native planner: not built", exc_type=ModuleNotFoundError)
nanobind = pytest.importorskip("nanobind", reason="nanobind: not installed (pip install '.[dev]')")

from ttnn_moe.sources import kernel_path  # noqa: E402
from ttnn_moe.tenstorrent import runtime  # noqa: E402
from ttnn_moe.tenstorrent.device import UNPACK_TO_DEST, Device  # noqa: E402
from ttnn_moe.tenstorrent.launch import Launcher  # noqa: E402
from ttnn_moe.tenstorrent.operators import Operators, Sizes  # noqa: E402

ROOT = Path(__file__).parents[1]
STAND_IN = Path(__file__).parent / "ttnn_stand_in"
SMALL = Sizes(E=16, E_local=4, K=2, H=96, I=64)
QWEN3 = Sizes(E=128, E_local=16, K=8, H=2048, I=768)
QWEN3_8BIT = Sizes(E=128, E_local=16, K=8, H=2048, I=768, weight_format="bfloat8_b")
CHIPS = {"blackhole": ((13, 10), 1572864), "wormhole_b0": ((8, 7), 1499136)}
REASON = "the typed operations are compiled with {0}: none here"

pytestmark = pytest.mark.slow


def tool(*names: str) -> str:
    """Path of a program, beside this Python or on PATH."""
    for name in names:
        found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        if found:
            return found
    pytest.skip(REASON.format(" or ".join(names)))


def configure(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        tool("cmake"), "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DCMAKE_CXX_COMPILER={os.environ.get('CXX') or tool('g++', 'c++', 'clang++')}", "-DCMAKE_BUILD_TYPE=Debug",
        f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}", "-DTTNN_MOE_WITH_TTNN=ON",
        *options,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build folder with both modules."""
    folder = tmp_path_factory.mktemp("typed") / "build"
    done = configure(folder, f"-DTT-NN_DIR={STAND_IN}")
    if "C++20" in done.stderr or "CXX20" in done.stderr or "No Python.h" in done.stderr:
        pytest.skip(REASON.format("a C++20 compiler and Python's headers"))
    assert done.returncode == 0, done.stderr[-4000:]
    command = [tool("cmake"), "--build", str(folder), "--target", "_ttnn_ops", "ttnn_stand_in"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:]
    assert "warning:" not in done.stdout, done.stdout[-8000:]
    return folder


def load(folder: Path, name: str) -> Any:
    (path,) = folder.rglob(f"{name}.*.so")
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stand_in(build: Path) -> Any:
    return load(build, "ttnn_stand_in")


@pytest.fixture(scope="module")
def ops(build: Path, stand_in: Any) -> Any:
    """ttnn_moe._ttnn_ops; the ttnn that it imports is the stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ttnn", stand_in)
        return load(build, "_ttnn_ops")


class On:
    """A chip of the stand-in, the tensors of one layer on it, and both ways to run an operator."""

    def __init__(self, ops: Any, stand_in: Any, arch: str, sizes: Sizes):
        grid, l1_bytes = CHIPS[arch]
        self.ops, self.stand_in, self.sizes, self.chip = ops, stand_in, sizes, stand_in.Device(arch, grid)
        machine = planner.Machine(grid=grid, l1_bytes=l1_bytes, unpack_to_dest=UNPACK_TO_DEST[arch])
        self.device = Device(self, 1, arch, machine)
        self.operators = Operators(self.device, sizes)

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
        made = {name: self.tensor(*_form(form)) for name, form in self.operators.buffers(bound).items()}
        del made["activations"]
        return {**made, "device_expert_mapping": self.rows(1, self.sizes.E_local)}

    def weight(self, name: str) -> Any:
        s = self.sizes
        return self.tensor((s.E_local, s.I, s.H) if name == "down" else (s.E_local, s.H, s.I), s.weight_format)

    def activations(self, bound: int) -> Any:
        return self.tensor((self.operators.rows(bound), self.sizes.I))

    def in_python(self, name: str, bound: int, tensors: dict[str, Any], scalars: dict[str, int], out="bfloat16") -> Any:
        """The descriptor of the Python launch path."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime, "_emulated", ttnn_descriptors)
            return Launcher(self.operators.plan(name, bound, out), self).descriptor(tensors, scalars)

    # Each runs the typed operation; returns the output and what the Python path makes of the same tensors.

    def route(self, T: int, bound: int, **more: Any) -> tuple[Any, Any]:
        s = self.sizes
        given = {
            "topk_ids": self.rows(T, s.K),
            "topk_weights": self.rows(T, s.K, dtype="float32"),
            "device_expert_mapping": self.rows(1, s.E_local),
        }
        made = self.ops.moe_routing(**given, num_experts=s.E, **more)
        names = ("num_routed_tokens", "routed_tokens", "routed_token_weights")
        return made, self.in_python("routing", bound, {**given, **dict(zip(names, made, strict=True))}, {"T": T})

    def gate_up(self, T: int, bound: int, up: bool = True, **more: Any) -> tuple[Any, Any]:
        routed = self.routing(bound)
        routed.pop("routed_token_weights")
        given = {"hidden": self.rows(T, self.sizes.H, dtype="bfloat16"), **routed}
        gate, second = self.weight("gate"), self.weight("up") if up else None
        out = self.ops.moe_gate_up(**given, gate=gate, up=second, experts_per_token=self.sizes.K, **more)
        weights = {"weight_0": gate} | ({"weight_1": second} if up else {})
        return out, self.in_python("gate_up" if up else "project", bound, {**given, **weights, "out": out}, {})

    def silu_mul(self, rows: int) -> tuple[Any, Any]:
        given = {name: self.tensor((rows, self.sizes.I)) for name in ("gate", "up")}
        out = self.ops.moe_silu_mul(**given)
        return out, self.in_python("silu_mul", rows, {**given, "out": out}, {})

    def down(self, T: int, bound: int, out_format: str = "bfloat16", accumulate: bool = False, **more: Any) -> Any:
        given = {"activations": self.activations(bound), **self.routing(bound)}
        weight = self.weight("down")
        if accumulate:
            more["output_tensor"] = self.tensor((T, self.sizes.H), out_format)
        out = self.ops.moe_down(
            **given, weight=weight, experts_per_token=self.sizes.K, num_tokens=T, accumulate=accumulate,
            output_dtype=getattr(self.stand_in.DataType, out_format), **more,
        )  # fmt: skip
        scalars = {"token_tiles": -(-T // 32), "accumulate": int(accumulate)}
        return out, self.in_python("down", bound, {**given, "weight_0": weight, "out": out}, scalars, out_format)


def _form(form: Any) -> tuple[Any, ...]:
    shape, dtype, layout = form
    return shape, dtype, layout == "TILE"


@pytest.fixture(params=["blackhole", "wormhole_b0"])
def on(request, ops, stand_in):
    return lambda sizes=SMALL: On(ops, stand_in, request.param, sizes)


@pytest.fixture
def small(ops, stand_in) -> On:
    return On(ops, stand_in, "blackhole", SMALL)


@pytest.mark.parametrize("sizes", [SMALL, QWEN3, QWEN3_8BIT], ids=["small", "qwen3", "qwen3-8bit"])
@pytest.mark.parametrize(("T", "bound"), [(1, 32), (33, 64), (4096, 4096)])
def test_programs_are_those_of_the_python_path(on, sizes: Sizes, T: int, bound: int) -> None:
    here = on(sizes)
    runs = [
        here.route(T, bound), here.gate_up(T, bound), here.gate_up(T, bound, up=False), here.down(T, bound),
        here.down(T, bound, "float32"),
    ]  # fmt: skip
    launched = here.chip.launched
    for (_, wanted), got in zip(runs, launched, strict=True):
        for kernel in got["kernels"]:
            kernel["include"] = [str(path) for path in kernel["include"]]
        assert got == wanted
        assert all(Path(kernel["source"]).is_file() for kernel in got["kernels"])
    assert here.chip.cache_entries == 5


def test_silu_mul_is_that_of_the_python_path(on) -> None:
    here = on(Sizes(1, 1, 1, 32, 64))
    _, wanted = here.silu_mul(256)
    (got,) = here.chip.launched
    for kernel in got["kernels"]:
        kernel["include"] = [str(path) for path in kernel["include"]]
    assert got == wanted and got["kernels"][0]["include"] == [str(kernel_path("device_kernels"))]


def test_one_program_serves_every_call_up_to_its_bound(small: On) -> None:
    wanted = []
    for T in (20, 64, 33):
        for run in (
            lambda T=T: small.route(T, 64, token_bound=64),
            lambda T=T: small.gate_up(T, 64),
            lambda T=T: small.down(T, 64),
            lambda T=T: small.down(T, 64, accumulate=True),
        ):
            wanted.append(run()[1])
    assert small.chip.cache_entries == 3
    launched = small.chip.launched
    for got, fresh in zip(launched, wanted, strict=True):
        # addresses and numbers of this call, in the program of the first
        for a, b in zip(got["kernels"], fresh["kernels"], strict=True):
            assert a["common_args"] == b["common_args"] and a["args"] == b["args"] and a["named"] == b["named"]
    assert launched[0]["kernels"][0]["common_args"] != launched[4]["kernels"][0]["common_args"]
    # and what a program depends on makes another
    small.down(20, 64, "float32")
    small.gate_up(20, 64, up=False)
    small.gate_up(20, 32)
    small.route(20, 32)
    assert small.chip.cache_entries == 7


def test_outputs(small: On) -> None:
    def forms(*tensors: Any) -> list[Any]:
        return [(tuple(t.shape), t.dtype.name, "TILE" if t.tiled else "ROW_MAJOR") for t in tensors]

    buffers = small.operators.buffers(64)
    made, _ = small.route(40, 64)
    assert forms(*made) == [buffers[n] for n in ("num_routed_tokens", "routed_tokens", "routed_token_weights")]
    assert forms(small.gate_up(40, 64)[0]) == [buffers["activations"]]
    assert forms(small.down(40, 64)[0], small.down(40, 64, "float32")[0]) == [
        ((40, SMALL.H), "bfloat16", "TILE"),
        ((40, SMALL.H), "float32", "TILE"),
    ]
    # what is given is written to
    again, _ = small.route(40, 64, output_tensors=made)
    assert [t.buffer_address() for t in again] == [t.buffer_address() for t in made]
    out = small.activations(64)
    assert small.gate_up(40, 64, output_tensor=out)[0].buffer_address() == out.buffer_address()
    out = small.tensor((40, SMALL.H), "float32")
    given = {"activations": small.activations(64), **small.routing(64), "weight": small.weight("down")}
    got = small.ops.moe_down(**given, experts_per_token=2, num_tokens=40, output_tensor=out)
    assert got.buffer_address() == out.buffer_address() and got.dtype.name == "float32"


T, BOUND, S = 40, 64, SMALL
# operator, the argument, what it is in place of the right one, what the message says of it
BAD: dict[str, tuple[str, str, Any, str]] = {
    "shape": (
        "gate_up",
        "gate",
        ((4, 64, 64), "bfloat16", True),
        "gate has the wrong shape; got [4, 64, 64]; expected [4, 96, 64].",
    ),
    "rank": (
        "gate_up",
        "hidden",
        ((1, T, 96), "bfloat16", False),
        "wrong number of dimensions; got [1, 40, 96]; expected 2 dim",
    ),
    "dtype": (
        "gate_up",
        "hidden",
        ((T, 96), "float32", False),
        "got float32; expected bfloat16; to fix it: ttnn.typecast(hidden, ttnn.bfloat16)",
    ),
    "two dtypes": (
        "down",
        "weight",
        ((4, 64, 96), "float32", True),
        "got float32; expected bfloat16 or bfloat8_b; to fix it: ttnn.typecast(weight,",
    ),
    "up unlike gate": (
        "gate_up",
        "up",
        ((4, 96, 64), "bfloat8_b", True),
        "up has the wrong dtype; got bfloat8_b; expected bfloat16",
    ),
    "layout": (
        "down",
        "weight",
        ((4, 64, 96), "bfloat16", False),
        "got ROW_MAJOR; expected TILE; to fix it: ttnn.to_layout(weight, ttnn.TILE_LAYOUT)",
    ),
    "tiles": ("routing", "topk_ids", ((T, 2), "int32", True), "got TILE; expected ROW_MAJOR"),
    "ids": (
        "routing",
        "topk_ids",
        ((T, 2), "uint32", False),
        "topk_ids has the wrong dtype; got uint32; expected int32",
    ),
    "weights of another T": (
        "routing",
        "topk_weights",
        ((T + 1, 2), "float32", False),
        "topk_weights has the wrong shape",
    ),
    "mapping": (
        "down",
        "device_expert_mapping",
        ((2, 4), "int32", False),
        "device_expert_mapping has the wrong shape; got [2, 4]; expected [1, 4]",
    ),
    "tokens": ("gate_up", "routed_tokens", ((15, BOUND), "int32", False), "routed_tokens has the wrong shape"),
    "routing weights": (
        "down",
        "routed_token_weights",
        ((16, BOUND), "float32", False),
        "routed_token_weights has the wrong dtype",
    ),
    "rows": ("down", "activations", ((32, 64), "bfloat16", True), "activations has the wrong shape; got [32, 64]"),
    "output": ("gate_up", "output_tensor", ((32, 64), "bfloat16", True), "output has the wrong shape; got [32, 64]"),
    "T": (
        "gate_up",
        "hidden",
        ((65, 96), "bfloat16", False),
        "T is beyond what the routing was made for; got 65; expected 1 .. 64.",
    ),
    "T of routing": ("routing", "token_bound", 32, "to fix it: a larger token_bound"),
    "T of down": ("down", "num_tokens", 65, "got 65; expected 1 .. 64"),
    "K": ("gate_up", "experts_per_token", 0, "K must be at least 1"),
    "E": ("routing", "num_experts", 3, "E_local = 4 exceeds E = 3"),
    "nothing to add to": ("down", "accumulate", True, "accumulate needs an output to add to; got none"),
    "silu_mul": (
        "silu_mul",
        "up",
        ((64, 32), "bfloat16", True),
        "up has the wrong shape; got [64, 32]; expected [64, 64]",
    ),
    "half a tile": (
        "silu_mul",
        "both",
        ((40, 64), "bfloat16", True),
        "gate has rows beside whole tiles; got 40; expected a multiple of 32",
    ),
    "half a column": ("silu_mul", "both", ((64, 40), "bfloat16", True), "must be multiples of 32"),
}


def arguments(on: On, operator: str) -> dict[str, Any]:
    s = on.sizes
    if operator == "routing":
        return {
            "topk_ids": on.rows(T, s.K), "topk_weights": on.rows(T, s.K, dtype="float32"), "num_experts": s.E,
            "device_expert_mapping": on.rows(1, s.E_local),
        }  # fmt: skip
    if operator == "silu_mul":
        return {name: on.tensor((64, s.I)) for name in ("gate", "up")}
    routed = on.routing(BOUND)
    if operator == "gate_up":
        routed.pop("routed_token_weights")
        hidden = on.rows(T, s.H, dtype="bfloat16")
        return {"hidden": hidden, **routed, "gate": on.weight("gate"), "up": on.weight("up"), "experts_per_token": s.K}
    given = {"activations": on.activations(BOUND), **routed, "weight": on.weight("down")}
    return {**given, "experts_per_token": s.K, "num_tokens": T}


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "cache hit"])
@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(small: On, name: str, warm: bool) -> None:
    operator, argument, value, message = BAD[name]
    run = getattr(small.ops, f"moe_{operator}")
    if warm:
        run(**arguments(small, operator))
    launched = len(small.chip.launched)
    wrong = small.tensor(*value) if isinstance(value, tuple) else value
    names = ("gate", "up") if argument == "both" else (argument,)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        run(**{**arguments(small, operator), **dict.fromkeys(names, wrong)})
    assert len(small.chip.launched) == launched


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"device": None}, "up is not on a device; got HOST; expected DEVICE; to fix it: ttnn.to_device(up, device)."),
        ({"dram": False}, "to fix it: ttnn.to_memory_config(up, ttnn.DRAM_MEMORY_CONFIG)."),
        ({"interleaved": False}, "up is not interleaved in DRAM"),
        ({"device": "another"}, "up is on another device"),
    ],
    ids=str,
)
def test_tensors_elsewhere_are_refused(small: On, stand_in: Any, place: dict[str, Any], message: str) -> None:
    given = arguments(small, "gate_up")
    if place.get("device") == "another":
        place = {"device": stand_in.Device("blackhole", (13, 10))}
    with pytest.raises(RuntimeError, match=re.escape(message)):
        small.ops.moe_gate_up(**{**given, "up": small.tensor((4, 96, 64), **place)})


def test_an_unknown_architecture_is_refused(ops: Any, stand_in: Any) -> None:
    chip = stand_in.Device("grayskull", (12, 9))
    gate = stand_in.tensor(chip, [32, 32], stand_in.DataType.bfloat16, True)
    with pytest.raises(RuntimeError, match="unknown architecture"):
        ops.moe_silu_mul(gate, gate)


def test_without_the_package_cmake_says_what_is_missing(tmp_path: Path) -> None:
    done = configure(tmp_path / "build", "-DCMAKE_DISABLE_FIND_PACKAGE_TT-NN=ON")
    if "No Python.h" in done.stderr:
        pytest.skip(REASON.format("Python's headers"))
    assert done.returncode != 0
    words = " ".join(done.stderr.split())
    assert "TTNN_MOE_WITH_TTNN=ON needs TT-NN's C++ development package" in words and "CMAKE_PREFIX_PATH" in words


def symbols(*command: str) -> set[str]:
    listing = subprocess.run([tool("nm"), *command], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in listing.splitlines() if len(line.split()) > 1}


def test_functions_are_those_of_ttnn_s_libraries(build: Path) -> None:
    """By their mangled names: namespace, class, function, types of its arguments."""
    if not os.environ.get("TTNN_MOE_TTNN"):
        pytest.skip("TTNN_MOE_TTNN does not name the folder of an installed ttnn package")
    libraries = sorted(Path(os.environ["TTNN_MOE_TTNN"]).rglob("*.so"))
    exported = set().union(*(symbols("-D", "--defined-only", str(path)) for path in libraries))
    objects = [str(path) for path in (build / "cpp" / "ttnn_ops" / "CMakeFiles" / "_ttnn_ops.dir").rglob("*.o")]
    used = symbols("-u", *objects) - symbols("--defined-only", *objects)
    theirs = {name for name in used if re.search(r"2tt\d|4ttnn", name) and "ttnn_moe" not in name}
    assert len(theirs) > 20 and theirs <= exported, sorted(theirs - exported)


def test_names_are_those_of_tt_metal_s_sources() -> None:
    """What the libraries do not show: members, enumerators, templates, and what is inline."""
    if not os.environ.get("TTNN_MOE_TT_METAL"):
        pytest.skip("TTNN_MOE_TT_METAL does not name a folder with tt-metal's sources")
    root = Path(os.environ["TTNN_MOE_TT_METAL"])
    text = "\n".join(
        path.read_text(encoding="utf-8", errors="replace")
        for path in root.rglob("*")
        if path.suffix in (".hpp", ".h", ".cpp") and path.is_file()
    )
    words = set(re.findall(r"\w+", text))
    missing = [name for name in NAMES.split() if name not in words]
    # an installed package has no headers, but libraries that name functions and Python's arguments
    libraries = [path.read_bytes() for path in root.rglob("*.so")] if missing else []
    assert not [name for name in missing if not any(name.encode() in library for library in libraries)]


# Every name of theirs in cpp/ttnn_ops.
NAMES = """
ARCH BLACKHOLE WORMHOLE_B0 DataFormat DataType BFLOAT16 FLOAT32 BFLOAT8_B INT32 UINT32 Layout ROW_MAJOR TILE
datatype_to_dataformat_converter Shape rank MemoryConfig memory_layout buffer_type TensorMemoryLayout INTERLEAVED
BufferType DRAM PageConfig TensorLayout TensorSpec StorageType DEVICE Tensor dtype layout logical_shape memory_config
storage_type buffer device create_device_tensor address CoreCoord CoreRange start_coord end_coord CoreRangeSet arch
compute_with_storage_grid_size worker_core_from_logical_core ProgramDescriptor kernels semaphores cbs KernelDescriptor
kernel_source source_type SourceType FILE_PATH core_ranges compile_time_args named_compile_time_args defines
runtime_args common_runtime_args config compiler_include_paths CoreRuntimeArgs ReaderConfigDescriptor
WriterConfigDescriptor ComputeConfigDescriptor math_fidelity math_approx_mode fp32_dest_acc_en dst_full_sync_en
unpack_to_dest_mode MathFidelity LoFi HiFi2 HiFi3 HiFi4 UnpackToDestMode UnpackToDestFp32 Default NUM_CIRCULAR_BUFFERS
CBDescriptor total_size format_descriptors CBFormatDescriptor buffer_index data_format page_size SemaphoreDescriptor
id initial_value TensorAccessorArgs append_to Program GetCommonRuntimeArgs TT_THROW MeshCoordinate launch
device_operation operation_attributes_t tensor_args_t spec_return_value_t tensor_return_value_t program_factory_t
create_descriptor override_runtime_arguments validate_on_program_cache_miss validate_on_program_cache_hit
compute_output_specs create_output_tensors compute_program_hash hash_t hash_objects_with_default_seed type_hash
"""
