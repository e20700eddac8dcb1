"""cpp/ttnn_ops, built with the project's own CMake against tests/support/ttnn_stand_in: each operation makes the
program that the Python launch path makes, keeps one program for every T, and refuses what it cannot run.

The stand-in declares the API that they use and no more. TTNN_MOE_TTNN, the folder of an installed ttnn package, has the
functions looked up in its libraries; TTNN_MOE_TT_METAL, a tt-metal checkout or such a folder, has every name looked up
in its sources.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paths import SUPPORT

pytest.importorskip("ttnn_moe._planner", reason="native planner: not built", exc_type=ModuleNotFoundError)
pytest.importorskip("nanobind", reason="nanobind: not installed (pip install '.[dev]')")

from ttnn_moe.sources import kernel_path  # noqa: E402
from ttnn_moe.tenstorrent.layer_sizes import Sizes  # noqa: E402
from ttnn_moe.tenstorrent.weight_formats import ComputeConfig  # noqa: E402
from typed_operation_cases import BAD, NAMES  # noqa: E402
from typed_operation_runs import REASON, On, arguments, configure, load, tool  # noqa: E402

STAND_IN = SUPPORT / "ttnn_stand_in"
SMALL = Sizes(E=16, E_local=4, K=2, H=96, I=64)
QWEN3 = Sizes(E=128, E_local=16, K=8, H=2048, I=768)
FORMATS = ("bfloat16", "float32", "uint32", "bfloat8_b", "bfloat4_b", "int32")
QWEN3_BLOCKS = Sizes(E=128, E_local=16, K=8, H=2048, I=768, weight_format="bfloat4_b,bfloat8_b")
LOFI = Sizes(E=16, E_local=4, K=2, H=96, I=64, weight_format="bfloat8_b", compute=ComputeConfig("LoFi", False))
HIFI2 = Sizes(E=16, E_local=4, K=2, H=96, I=64, weight_format="bfloat4_b", compute=ComputeConfig("HiFi2", True))
SIZES = {"small": SMALL, "qwen3": QWEN3, "blocks": QWEN3_BLOCKS, "lofi": LOFI, "hifi2": HIFI2}

pytestmark = pytest.mark.slow(10)


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


@pytest.fixture(scope="module")
def stand_in(build: Path) -> Any:
    return load(build, "ttnn_stand_in")


@pytest.fixture(scope="module")
def ops(build: Path, stand_in: Any) -> Any:
    """ttnn_moe._ttnn_ops; the ttnn that it imports is the stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ttnn", stand_in)
        return load(build, "_ttnn_ops")


@pytest.fixture(params=["blackhole", "wormhole_b0"])
def on(request, ops, stand_in):
    return lambda sizes=SMALL: On(ops, stand_in, request.param, sizes)


@pytest.fixture
def small(ops, stand_in) -> On:
    return On(ops, stand_in, "blackhole", SMALL)


def same_programs(here: On, runs: list[tuple[Any, Any]]) -> bool:
    """Whether the programs launched last are those of the Python path."""
    launched = here.chip.launched[-len(runs) :]
    for kernel in (kernel for got in launched for kernel in got["kernels"]):
        kernel["include"] = [str(path) for path in kernel["include"]]
    return launched == [wanted for _, wanted in runs]


@pytest.mark.parametrize(
    "sizes", [SMALL, QWEN3, QWEN3_BLOCKS, LOFI, HIFI2], ids=["small", "qwen3", "blocks", "lofi", "hifi2"]
)
@pytest.mark.parametrize(("T", "bound"), [(1, 32), (33, 64), (4096, 4096)])
def test_programs_are_those_of_the_python_path(on, sizes: Sizes, T: int, bound: int) -> None:
    here = on(sizes)
    runs = [
        here.route(T, bound),
        here.gate_up(T, bound),
        here.gate_up(T, bound, up=False),
        here.down(T, bound),
        here.down(T, bound, "float32"),
    ]
    assert same_programs(here, runs) and here.chip.cache_entries == len(here.chip.launched) == 5
    assert all(Path(kernel["source"]).is_file() for got in here.chip.launched for kernel in got["kernels"])


def test_silu_mul_is_that_of_the_python_path(on) -> None:
    here = on(Sizes(1, 1, 1, 32, 64))
    assert same_programs(here, [here.silu_mul(256)])
    assert here.chip.launched[0]["kernels"][0]["include"] == [kernel_path("device_kernels")]


def test_a_sub_device_s_cores_are_the_program_s(on) -> None:
    here = on()
    whole = here.down(20, 32)[1]
    for entries, cores in ((4, (4, 3)), (7, (2, 2))):
        here.on_sub_device(*cores)
        runs = [here.route(20, 32), here.gate_up(20, 32), here.down(20, 32)]
        assert same_programs(here, runs) and runs[-1][1] != whole
        assert here.chip.cache_entries == entries
    here.on_sub_device(2, 2)  # another id, the same cores
    here.down(20, 32)
    assert here.chip.cache_entries == 7


@pytest.mark.parametrize("l1_bytes", [1024 * 1024, 700 * 1024])
def test_l1_is_the_device_s(ops: Any, stand_in: Any, l1_bytes: int) -> None:
    here = On(ops, stand_in, "blackhole", QWEN3, l1_bytes)
    assert same_programs(here, [here.gate_up(20, 32), here.down(20, 32)])
    sizes = [sum(size for size, _, _ in program["cbs"]) for program in here.chip.launched]
    assert max(sizes) <= l1_bytes - 128 * 1024


def test_too_little_l1_is_refused(ops: Any, stand_in: Any) -> None:
    here = On(ops, stand_in, "blackhole", SMALL)
    here.chip = stand_in.Device("blackhole", (13, 10), 160 * 1024)
    with pytest.raises(RuntimeError, match="no program of gate_up for these sizes.*L1"):
        ops.moe_gate_up(**arguments(here, "gate_up"))


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

    buffers = small.programs.buffers(64)
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


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "cache hit"])
@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(small: On, name: str, warm: bool) -> None:
    operator, argument, value, message = BAD[name]
    run = getattr(small.ops, f"moe_{operator}")
    if warm:
        run(**arguments(small, operator))
    launched = len(small.chip.launched)
    wrong = small.tensor(*value) if isinstance(value, tuple) else value(small) if callable(value) else value
    names = ("gate", "up") if argument == "both" else (argument,)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        run(**{**arguments(small, operator), **dict.fromkeys(names, wrong)})
    assert len(small.chip.launched) == launched


@pytest.mark.parametrize("operator", ["routing", "gate_up", "silu_mul", "down"])
def test_no_other_tensor_hits(small: On, stand_in: Any, operator: str) -> None:
    """A cache hit checks nothing, so a tensor of another form or place is refused, or has a program of its own."""
    run = getattr(small.ops, f"moe_{operator}")
    given = arguments(small, operator)
    made = run(**given)
    if operator == "routing":
        given["output_tensors"] = made
    else:
        given["output_tensor"] = made
    run(**given)
    assert small.chip.cache_entries == 1
    tensors = {name: value for name, value in given.items() if isinstance(value, stand_in.Tensor)}
    tensors |= {f"output_tensors {i}": tensor for i, tensor in enumerate(given.get("output_tensors", ()))}
    for name, tensor in tensors.items():
        form = {"shape": tuple(tensor.shape), "dtype": tensor.dtype.name, "tiled": tensor.tiled}
        others = [{"dtype": dtype} for dtype in FORMATS if dtype != form["dtype"]]
        others += [{"tiled": not tensor.tiled}, {"dram": False}, {"interleaved": False}, {"device": None}]
        others += [{"device": stand_in.Device("blackhole", (13, 10))}, {"shape": (1, *form["shape"])}]
        for at in range(name == "hidden", len(form["shape"])):  # one program serves every T
            others.append({"shape": tuple(size + 32 * (i == at) for i, size in enumerate(form["shape"]))})
        for other in others:
            wrong, programs = small.tensor(**{**form, **other}), small.chip.cache_entries
            listed, _, i = name.partition(" ")
            value = [wrong if str(j) == i else t for j, t in enumerate(given[listed])] if i else wrong
            try:
                run(**{**given, listed: value})
            except RuntimeError:
                assert small.chip.cache_entries == programs
            else:
                assert small.chip.cache_entries == programs + 1, (name, other)


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
        small.ops.moe_gate_up(**{**given, "up": small.tensor((4, 2, 96, 32), **place)})


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
