"""What this machine has and lacks: backends, versions, CPU features, native planner, TTNN_MOE_* settings."""

from __future__ import annotations

import importlib
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from . import __version__, registry
from .cuda.jit import build
from .errors import FIX
from .packages import install, versions
from .tables import plain, print_table
from .tenstorrent.runtime import PLANNER_REMEDY

if TYPE_CHECKING:
    from .tenstorrent.plans import Report

# what torch's CPU kernels choose by: x86 names, then Arm's
CPU_FLAGS = tuple(
    "avx2 fma avx512f avx512_bf16 avx512_vnni avx512_fp16 amx_tile amx_bf16 amx_int8 "
    "asimd asimddp bf16 i8mm sve sve2".split()
)

# what the planner knows of a chip
CHIP = "name arch chips_per_board tensix_grid compute_grid l1_bytes dram_bytes dram_bytes_per_s clock_hz".split()


def examine() -> dict[str, Any]:
    """Everything `doctor` shows, as plain values that JSON can hold.

    Never raises for what a machine lacks: a part that is absent or broken is described as such.
    """
    return {
        "ttnn_moe": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu(),
        "packages": versions(),
        "torch_cuda": torch.version.cuda,
        "backends": {name: asdict(registry.probe(name)) for name in registry.backends()},
        "cuda_cpp": _cuda_cpp(),
        "planner": _planner(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("TTNN_MOE_")},
    }


def _cpu() -> dict[str, Any]:
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return {
        "model": info.get("model name") or platform.processor() or platform.machine(),
        "logical_cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "features": [flag for flag in CPU_FLAGS if flag in flags],
    }


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n", 1)[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _cuda_cpp() -> dict[str, Any]:
    """Whether CUDA C++ kernels can be compiled here; that needs no GPU."""
    reason = build.why_not()
    reason = (reason or "").partition(f"; {FIX}")[0]
    return {"compiles": not reason, "reason": reason, "remedy": install("cuda") if reason else ""}


def _planner() -> dict[str, Any]:
    try:
        planner = importlib.import_module("ttnn_moe._planner")
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError)
        return {
            "built": False,
            "reason": "not built" if absent else f"built, but it does not load: {error}",
            "remedy": PLANNER_REMEDY,
            "chips": [],
        }
    chips = [{part: getattr(chip, part) for part in CHIP} for chip in planner.chips()]
    return {"built": True, "reason": "", "remedy": "", "chips": chips}


def render(found: dict[str, Any], console: Console) -> None:
    """Print what `examine` returned, for people."""
    console.print(f"[bold]ttnn-moe {found['ttnn_moe']}[/] on Python {found['python']}, {found['system']}")
    cpu = found["cpu"]
    console.print(
        f"CPU: {plain(cpu['model'])}, {cpu['usable_cores']} of {cpu['logical_cores']} cores usable, "
        f"{cpu['torch_threads']} torch threads, torch kernels for {cpu['torch_capability']}"
    )
    console.print(f"     {' '.join(cpu['features']) or 'no features of interest found'}", highlight=False)

    rows = []
    for name, backend in found["backends"].items():
        if backend["available"]:
            rows.append((name, "[green]yes[/]", plain(", ".join(backend["devices"])), ""))
        else:
            rows.append((name, "[red]no[/]", plain(backend["reason"]), plain(backend["remedy"])))
    print_table(console, "Backends", ("backend", "here", "devices, or why not", "to have it"), rows)

    packages = dict(found["packages"])
    if packages.get("torch") and found["torch_cuda"]:
        packages["torch"] += f" (CUDA {found['torch_cuda']})"
    print_table(
        console, "Packages", ("package", "version"), [(k, v or "[dim]not installed[/]") for k, v in packages.items()]
    )

    cuda_cpp = found["cuda_cpp"]
    if not cuda_cpp["compiles"]:
        console.print(f"\n[bold]CUDA C++ kernels[/]: {plain(cuda_cpp['reason'])}")
        console.print("  NVIDIA GPUs run only Triton kernels then: dense experts, and none in int4_24 or mxfp4")
        console.print(f"  to have them: {plain(cuda_cpp['remedy'])}")

    planner = found["planner"]
    if planner["built"]:
        chips = [
            (
                chip["name"],
                chip["arch"],
                _grid(chip["tensix_grid"]),
                _grid(chip["compute_grid"]),
                f"{chip['l1_bytes'] / 2**10:.0f} KiB",
                f"{chip['dram_bytes'] / 2**30:.1f} GiB",
                f"{chip['dram_bytes_per_s'] / 1e9:.0f} GB/s",
                f"{chip['clock_hz'] / 1e9:.2f} GHz",
            )
            for chip in planner["chips"]
        ]
        columns = ("chip", "arch", "Tensix", "to programs", "L1 a core", "DRAM", "bandwidth", "clock")
        print_table(console, "Chips that Tenstorrent programs can be planned for", columns, chips)
    else:
        console.print(f"\n[bold]Native planner[/]: {plain(planner['reason'])}")
        console.print(f"  to have it: {plain(planner['remedy'])}")

    if found["environment"]:
        print_table(
            console, "Settings", ("variable", "value"), [(plain(k), plain(v)) for k, v in found["environment"].items()]
        )


def render_plan(report: Report, console: Console) -> None:
    """Print what `tenstorrent.plans.plan_model` returned, for people."""
    from .tenstorrent.plans import in_words

    console.print(
        f"[bold]{plain(report.model)}[/] on a {report.mesh} mesh of {report.chip}, weights "
        f"{report.weight_format}, {report.batch} sequences of {report.sequence} tokens"
    )
    rows = [
        (
            plan.operator,
            f"{plan.T}",
            f"{plan.cores}",
            f"{'-'.join(map(str, sorted(set(plan.share))))} {plan.unit}",
            f"{plan.l1_bytes / 2**10:.0f} of {report.usable_l1 / 2**10:.0f} KiB",
            f"{plan.weight_bytes / 1e6:.1f}",
            f"{plan.row_bytes / 1e6:.2f}",
        )
        for plan in report.plans
    ]
    columns = ("operator", "T up to", "cores", "a core's share", "L1 a core", "weights MB", "rows MB")
    print_table(console, "Programs of one layer on each chip, and the DRAM traffic of a call", columns, rows)
    total = ("[bold]together[/]", "", "", f"[bold]{in_words(report.needed)}[/]")
    memory = [
        (part.name, plain(part.what), "shared" if part.chips > 1 else "a copy", in_words(part.per_chip))
        for part in report.parts
    ]
    has = f"{in_words(report.dram_bytes)} on each {report.chip}"
    print_table(console, f"Memory of each chip, of {has}", ("part", "what", "on each", "DRAM"), [*memory, total])
    spare = report.dram_bytes - report.needed
    console.print(
        f"[green]fits[/], {in_words(spare)} to spare" if report.fits else f"[red]does not fit[/], by {in_words(-spare)}"
    )


def _grid(grid: tuple[int, int]) -> str:
    return f"{grid[0]}x{grid[1]}"
