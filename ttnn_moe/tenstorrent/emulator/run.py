"""Run a program: compile its kernels, describe it to the engine, read the result."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ContractError, TtnnMoeError
from ...sizes import natural
from ...sources import kernel_path
from .build import KERNELS, KernelBuild, build_all, engine
from .dram import EmulatedChip, Tensor
from .formats import find_format
from .program import Values
from .result import Result, result_of

ROLES = ("reader", "writer", "compute")
SEED_VARIABLE = "TTNN_MOE_EMULATOR_SEED"
FIDELITIES = ("LoFi", "HiFi2", "HiFi3", "HiFi4")


class EngineFailed(TtnnMoeError, RuntimeError):
    """The engine ended without a result."""


def run(
    program: Any,
    device: EmulatedChip,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, int] | None = None,
    *,
    root: Path | None = None,
    check: bool = True,
    sanitizer: str | None = None,
    timeout_s: int = 600,
    exact: bool = True,
    undefined: Collection[str] = (),
    seed: int | None = None,
) -> Result:
    """Run a program on an emulated chip.

    Args:
        program: a program.Program, or one of the planner.
        device: holds the tensors.
        tensors: by the names that the program's placeholders use.
        scalars: numbers, by name.
        root: folder of the kernel sources; default: device_kernels.
        check: raise EmulationError if there are findings; otherwise they are in the result.
        sanitizer: "address" or "thread": build engine and kernels with it.
        timeout_s: wall time after which the engine is stopped.
        undefined: tensors of which the program may read unwritten values.
        seed: of the schedule. 0: what has the least simulated time runs first. Any other: roles and NoC messages are
            delayed at random, within what the hardware allows; default: $TTNN_MOE_EMULATOR_SEED, else 0.
        exact: round matrix products as the FPU does, and check that accesses are ordered. False: fp32 sums and no
            such check, several times faster.

    Raises:
        EmulationError: the program broke a rule of the hardware.
        CompileError: a kernel does not compile.
        BackendUnavailable: there is no C++ compiler.
        EngineFailed: the engine crashed, or took too long.
    """
    root = root or kernel_path("device_kernels")
    seed = seed_of_environment() if seed is None else seed
    values = Values(tensors, scalars or {}, device.chip)
    builds = [_kernel_build(kernel, program, values, device.chip.arch, root, sanitizer) for kernel in program.kernels]
    with tempfile.TemporaryDirectory(prefix="ttnn-moe-emulator-") as folder:
        described, result = Path(folder, "program"), Path(folder, "result")
        for last in (False, True):
            libraries, executable = build_all(builds), engine(sanitizer)
            described.write_text(_describe(program, device, tensors, values, libraries, exact, undefined, seed))
            began = time.perf_counter()
            done = _start([executable, described, f"/proc/self/fd/{device.file}", result, folder], device, timeout_s)
            seconds = time.perf_counter() - began
            if last or all(path.exists() for path in (executable, *(library for library, _ in libraries))):
                break  # else the cache was cleared meanwhile
        if done.returncode != 0 or not result.exists():
            raise EngineFailed(
                "the emulator ended without a result",
                got=f"exit status {done.returncode}, seed {seed}\n{done.stderr[-6000:]}",
            )
        outcome = result_of(json.loads(result.read_text()), (Path(KERNELS),), seconds, seed)
    return outcome.raise_for_findings() if check else outcome


def seed_of_environment() -> int:
    """The schedule's seed that $TTNN_MOE_EMULATOR_SEED names, else 0."""
    said = os.environ.get(SEED_VARIABLE) or "0"
    seed = natural(said)
    if seed is None:
        raise ContractError(
            f"{SEED_VARIABLE} is no seed",
            got=repr(said),
            expected="a number from 0 on",
            remedy=f"unset {SEED_VARIABLE}, or set it to a number",
        )
    return seed


def _start(command: Sequence[str | Path], device: EmulatedChip, timeout_s: int) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [*map(str, command), str(timeout_s)],
            pass_fds=(device.file,),
            capture_output=True,
            text=True,
            timeout=timeout_s + 30,
            check=False,
            env={**os.environ, "TSAN_OPTIONS": "halt_on_error=0 exitcode=66", "ASAN_OPTIONS": "detect_leaks=0"},
        )
    except subprocess.TimeoutExpired:
        raise EngineFailed("the emulator did not end", got=f"still running after {timeout_s} s") from None
    except OSError as error:  # the executable is gone, or its folder forbids to run it
        return subprocess.CompletedProcess([], 127, "", str(error))


def _kernel_build(
    kernel: Any, program: Any, values: Values, arch: str, root: Path, sanitizer: str | None
) -> KernelBuild:
    if kernel.role not in ROLES:
        raise ContractError("unknown role of a kernel", got=kernel.role, expected=", ".join(ROLES))
    cores = set(map(tuple, kernel.cores))
    formats = [
        (buffer.index, find_format(buffer.format))
        for buffer in program.buffers
        if not cores.isdisjoint(map(tuple, buffer.cores))
    ]
    return KernelBuild(
        source=root / kernel.source,
        root=root,
        role=kernel.role,
        arch=arch,
        compile_args=tuple(values.numbers(kernel.compile_args)),
        named=tuple(sorted((name, int(value)) for name, value in kernel.named_compile_args.items())),
        defines=tuple(sorted((str(name), str(value)) for name, value in kernel.defines.items())),
        buffers=tuple(sorted((index, form.name, form.tile_bytes) for index, form in formats)),
        fp32_dest=kernel.role == "compute" and bool(kernel.config.fp32_dest_acc),
        sanitizer=sanitizer,
    )


def _describe(
    program: Any,
    device: EmulatedChip,
    tensors: Mapping[str, Tensor],
    values: Values,
    libraries: Sequence[tuple[Path, bool]],
    exact: bool,
    undefined: Collection[str],
    seed: int,
) -> str:
    """The program as the text that engine/program.cpp reads."""
    chip = device.chip
    per_cycle = chip.dram_bytes_per_s / chip.clock_hz / chip.dram_banks
    lines = [f"seed {seed}"] if exact else [f"seed {seed}", "fast"]
    lines.append(
        f'chip "{chip.arch}" {chip.l1_size} {chip.l1_first} {chip.dram_banks} {chip.dram_alignment} '
        f"{chip.dram_read_alignment} {per_cycle} {chip.noc_bytes_per_cycle} {chip.grid[0]} {chip.grid[1]}"
    )
    lines += [f"{x} {y}" for y in chip.noc_y[: chip.grid[1]] for x in chip.noc_x[: chip.grid[0]]]
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.device is not device or tensor.freed:
            raise ContractError(
                f"tensor {name} is not on this device",
                got="a freed tensor" if tensor.freed else "a tensor of another device",
                expected="a tensor that device.tensor made, not freed",
            )
        if tensor.address not in seen:
            seen.add(tensor.address)
            shadow = -1 if name in undefined else tensor.shadow
            lines.append(
                f'tensor "{name}" {tensor.address} {tensor.page_size} {tensor.pages} {tensor.storage} {shadow}'
            )
    for buffer in program.buffers:
        address = getattr(buffer, "address", None)
        lines.append(
            f"circular_buffer {buffer.index} {-1 if address is None else address} {buffer.total_size} "
            f"{buffer.page_size} {find_format(buffer.format).code} {_cores(buffer.cores)}"
        )
    for semaphore in program.semaphores:
        lines.append(f"semaphore {semaphore.id} {semaphore.initial} {_cores(semaphore.cores)}")
    for kernel, (library, own_globals) in zip(program.kernels, libraries, strict=True):
        compute = kernel.role == "compute"
        phases = FIDELITIES.index(kernel.config.math_fidelity) + 1 if compute else 4
        fp32, full = (kernel.config.fp32_dest_acc, kernel.config.dst_full_sync) if compute else (False, False)
        whole = list(kernel.config.unpack_to_dest_fp32) if compute else []
        head = (json.dumps(str(library)), f'"{kernel.source}"', ROLES.index(kernel.role), int(own_globals), phases)
        common = _numbers(values.numbers(kernel.common_args))
        words = ("kernel", *head, int(fp32), int(full), _numbers(whole), common, len(kernel.cores))
        lines.append(" ".join(map(str, words)))
        args = {tuple(core): own for core, own in kernel.args.items()}
        for core in kernel.cores:
            lines.append(f"{core[0]} {core[1]} {_numbers(values.numbers(args.get(tuple(core), ())))}")
    return "\n".join(lines) + "\n"


def _numbers(values: Sequence[int]) -> str:
    return " ".join(map(str, (len(values), *values)))


def _cores(cores: Sequence[tuple[int, int]]) -> str:
    return " ".join(map(str, (len(cores), *(v for core in cores for v in core))))
