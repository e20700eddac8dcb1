"""Host time of a Tenstorrent layer's launches: a descriptor for every call (before), and one that calls patch (after).

    TT_METAL_SIMULATOR=<dir>/libttsim.so TT_METAL_SLOW_DISPATCH_MODE=1 PYTHONPATH=. \
        python benchmarks/tenstorrent_host.py --json benchmarks/results/tenstorrent_host.json

The layer is Qwen3-30B-A3B's on one device of a 1x8 mesh. Both ways run in one process, in turns. Two figures:

* ours: moe() with ttnn.generic_op replaced by a function that does nothing: our Python, on ttnn's descriptors.
* with generic_op: ttnn's own work is added, up to the enqueueing. tt-metal's EnqueueMeshWorkload is replaced by a
  function that does nothing (--enqueue none preloads it; this needs a C compiler). Nothing is compiled or run.

A gate compares what the two ways hand over: the program's hash, and the arguments of every kernel.
--stand-in FILE uses that Python module in place of ttnn. --typed FOLDER times cached launches of cpp/ttnn_ops instead,
built there against tests/support/ttnn_stand_in.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from command_line import Json, run_script, write
from rich.console import Console
from rich.table import Table

from ttnn_moe import Placement, tenstorrent
from ttnn_moe.tenstorrent import Device, DeviceExperts, tensors
from ttnn_moe.tenstorrent.launch import Launcher
from ttnn_moe.tenstorrent.layer_sizes import Sizes
from ttnn_moe.tenstorrent.runtime import library, use

QWEN3 = Sizes(E=128, E_local=16, K=8, H=2048, I=768)
FLAG = "no_enqueue"
ENQUEUE = "_ZN2tt8tt_metal11distributed19EnqueueMeshWorkloadERNS1_16MeshCommandQueueERNS1_12MeshWorkloadEb"
PRELOAD = f"void {ENQUEUE}(void* queue, void* workload, _Bool blocking) {{}}\nint {FLAG} = 1;\n"


@dataclass
class Row:
    """Host time of an operator and of a layer, before and after, in microseconds: the quickest round."""

    where: str
    what: str  # "ours" or "with generic_op"
    T: int
    before_us: dict[str, float]
    after_us: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.before_us["layer"] / self.after_us["layer"]


@dataclass
class Layer:
    """The tensors of a call on the device, uninitialised."""

    experts: DeviceExperts
    hidden: Any
    routing: tenstorrent.DeviceRouting
    out: Any

    @classmethod
    def make(cls, device: Device, sizes: Sizes, T: int) -> Layer:
        def new(shape: tuple[int, ...], dtype: str = "bfloat16", layout: str = "TILE") -> Any:
            return tensors.empty(shape, dtype, layout, device)

        s = sizes
        up, down = (s.E_local, s.H, s.I), (s.E_local, s.I, s.H)
        placement = Placement.uniform(s.E, s.E // s.E_local)
        mapping = new((1, s.E_local), "int32", "ROW_MAJOR")
        formats, made = tenstorrent.ExpertFormats(), (new(up), new(up), new(down), mapping)
        experts = DeviceExperts(device, s.E, s.H, s.I, formats, placement, *made)
        routing = tenstorrent.DeviceRouting(new((T, s.K), "int32", "ROW_MAJOR"), new((T, s.K), "float32", "ROW_MAJOR"))
        return cls(experts, new((T, s.H), "bfloat16", "ROW_MAJOR"), routing, new((T, s.H)))

    def run(self) -> None:
        tenstorrent.moe(self.hidden, self.routing, self.experts, out=self.out)


def launch_anew(launcher: Launcher, given: Any, scalars: Any) -> None:
    """A launch as it was: a descriptor for every call."""
    library().generic_op(list(given.values()), launcher.descriptor(given, scalars))


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def launches(run: Callable[[], None]) -> list[tuple[Launcher, Any, Any]]:
    """The launches of a run, with their arguments; nothing is launched."""
    found: list[tuple[Launcher, Any, Any]] = []
    with replaced(Launcher, "__call__", lambda *args: found.append(args)):
        run()
    return found


def check(layers: list[Layer]) -> None:
    """Each launch hands over the hash and the arguments of a new descriptor. Raises AssertionError."""
    ttnn = library()

    handed: list[Any] = []
    with replaced(ttnn, "generic_op", lambda given, descriptor: handed.append(_told(descriptor))):
        for layer in layers:
            layer.run()
    wanted = [
        launcher.descriptor(given, scalars) for layer in layers for launcher, given, scalars in launches(layer.run)
    ]
    assert handed == [_told(descriptor) for descriptor in wanted], "a patched descriptor differs from a new one"


def _told(descriptor: Any) -> tuple[int, list[list[int]]]:
    commons = [list(kernel.common_runtime_args) for kernel in descriptor.kernels]
    return library().compute_program_descriptor_hash(descriptor), commons


def timed(run: Callable[[], object], calls: int) -> float:
    """Microseconds of a call."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls * 1e6


def measure(device: Device, sizes: Sizes, T: int, rounds: int, calls: int, ours: bool = True) -> Row:
    """Both ways in turns; the quickest round, since a machine is shared. ours: generic_op does nothing.

    Raises:
        AssertionError: the gate.
    """
    ttnn, layers = library(), [Layer.make(device, sizes, T) for _ in range(2)]
    idle = (lambda given, descriptor: None) if ours else ttnn.generic_op
    before: dict[str, list[float]] = {}
    after: dict[str, list[float]] = {}
    with replaced(ttnn, "generic_op", idle):
        for layer in layers:
            layer.run()
        check(layers)
        each = [(Path(args[0].program.kernels[0].source).parent.name, args) for args in launches(layers[0].run)]

        def as_it_was() -> None:
            layers[0].experts.ready.clear()
            layers[0].run()

        for _ in range(rounds):
            for name, args in each:
                before.setdefault(name, []).append(timed(partial(launch_anew, *args), max(1, calls // 20)))
                after.setdefault(name, []).append(timed(partial(args[0], *args[1:]), calls))
            with replaced(Launcher, "__call__", launch_anew):
                before.setdefault("layer", []).append(timed(as_it_was, max(1, calls // 20)))
            after.setdefault("layer", []).append(timed(layers[0].run, calls))
        check(layers)

    def least(found: dict[str, list[float]]) -> dict[str, float]:
        return {name: round(min(times), 1) for name, times in found.items()}

    return Row(str(device), "ours" if ours else "with generic_op", T, least(before), least(after))


def measure_typed(folder: Path, T: int, rounds: int, calls: int) -> dict[str, float]:
    """Cached launches of cpp/ttnn_ops against tests/support/ttnn_stand_in, built in `folder`, outputs given."""
    there = _module("ttnn_stand_in", next(folder.rglob("ttnn_stand_in.*.so")))
    sys.modules["ttnn"] = there
    ops = _module("_ttnn_ops", next(folder.rglob("_ttnn_ops.*.so")))
    chip, s, bound = there.Device("blackhole", (13, 10)), QWEN3, 32
    chip.keep = False

    def new(*shape: int, dtype: str = "bfloat16", tiled: bool = True) -> Any:
        return there.tensor(chip, list(shape), getattr(there.DataType, dtype), tiled)

    def rows(*shape: int, dtype: str = "int32") -> Any:
        return new(*shape, dtype=dtype, tiled=False)

    mapping = rows(1, s.E_local)
    given = {"topk_ids": rows(T, s.K), "topk_weights": rows(T, s.K, dtype="float32"), "device_expert_mapping": mapping}
    routed = ops.moe_routing(**given, num_experts=s.E, token_bound=bound)
    shared = {"num_routed_tokens": routed[0], "device_expert_mapping": mapping, "routed_tokens": routed[1]}
    gate, up = new(s.E_local, s.H, s.I), new(s.E_local, s.H, s.I)
    hidden = rows(T, s.H, dtype="bfloat16")
    rows_of = ops.moe_gate_up(hidden, *shared.values(), gate, up, experts_per_token=s.K)
    out, down = new(T, s.H), new(s.E_local, s.I, s.H)
    calls_of: dict[str, Callable[[], object]] = {
        "routing": lambda: ops.moe_routing(**given, num_experts=s.E, token_bound=bound, output_tensors=routed),
        "gate_up": lambda: ops.moe_gate_up(
            hidden, *shared.values(), gate, up, experts_per_token=s.K, output_tensor=rows_of
        ),
        "down": lambda: ops.moe_down(
            rows_of, *shared.values(), routed[2], down, experts_per_token=s.K, num_tokens=T, output_tensor=out
        ),
    }
    found = {}
    for name, run in calls_of.items():
        run()
        found[name] = round(min(timed(run, calls) for _ in range(rounds)), 1)
    return {**found, "layer": round(sum(found.values()), 1)}


def _module(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_enqueue() -> None:
    """Start this script again with tt-metal's enqueueing replaced by nothing."""
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "preload.c"), Path(folder, "preload.so")
        source.write_text(PRELOAD)
        subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(built)], check=True)
        done = subprocess.run([sys.executable, *sys.argv], env={**os.environ, "LD_PRELOAD": str(built)}, check=False)
    raise typer.Exit(done.returncode)


def main(
    json_file: Json = None,
    tokens: Annotated[list[int] | None, typer.Option("--tokens", help="T of a call.", show_default="1, 32")] = None,
    rounds: int = 9,
    calls: Annotated[int, typer.Option(help="Of a round.")] = 200,
    enqueue: Annotated[str, typer.Option(help="'none': time generic_op, too.")] = "as it is",
    stand_in: Annotated[Path | None, typer.Option(help="A module in place of ttnn.")] = None,
    typed: Annotated[Path | None, typer.Option(help="Build folder of cpp/ttnn_ops and its stand-in.")] = None,
) -> None:
    kept = {} if json_file is None or not json_file.exists() else json.loads(json_file.read_text())
    if typed is not None:
        kept["typed_us"] = measure_typed(typed, 32, rounds, calls)
        print(f"typed operations, cached launch, us: {kept['typed_us']}")
    else:
        found = _measured(tokens or [1, 32], rounds, calls, enqueue, stand_in)
        kept["host"] = {"processor": _processor(), "python": platform.python_version()}
        old = [row for row in kept.get("rows", []) if row["where"] != found[0].where]
        kept["rows"] = old + [{**asdict(row), "ratio": round(row.ratio, 1)} for row in found]
    if json_file is not None:
        write(json_file, kept)


def _measured(tokens: list[int], rounds: int, calls: int, enqueue: str, stand_in: Path | None) -> list[Row]:
    preloaded = hasattr(ctypes.CDLL(None), FLAG)
    if enqueue == "none" and not preloaded:
        without_enqueue()
    if stand_in is not None:
        sys.path.insert(0, str(stand_in.parent))
        module = _module(stand_in.stem, stand_in)
        use(module)
        device = tenstorrent.attach(module.Device())
    else:
        device = tenstorrent.open_device()
    kinds = (True, False) if preloaded else (True,)
    found = [measure(device, QWEN3, T, rounds, calls, ours) for T in tokens for ours in kinds]
    table = Table("T", "what", "before, us", "after, us", "ratio", title=f"host time of a layer, {device}")
    for row in found:
        table.add_row(str(row.T), row.what, str(row.before_us), str(row.after_us), f"{row.ratio:.0f}")
    Console(width=200).print(table)
    return found


def _processor() -> str:
    """The processor's name, as Linux has it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()


if __name__ == "__main__":
    run_script(main)
