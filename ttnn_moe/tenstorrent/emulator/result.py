"""The result of a run: findings, counts per core, simulated time."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import TtnnMoeError


@dataclass
class Finding:
    """An error of a program: silicon would hang or corrupt data, or the program relies on luck.

    Args:
        kind: its stable name, as docs/emulator.md lists them.
        core: "(x, y)" of the first core.
        role: reader, writer, compute; empty if no kernel is at fault.
        kernel: source of the kernel.
        place: "file:line" of the source line, where known.
        message: what happened.
        count: how often, on all cores.
        seed: of the schedule that ran; 0: the emulator's own.
    """

    kind: str
    core: str
    role: str
    kernel: str
    place: str
    message: str
    count: int
    seed: int = 0

    def __str__(self) -> str:
        who = " ".join(part for part in (f"core {self.core}", self.role, self.place or self.kernel) if part)
        times = f" ({self.count} times)" if self.count > 1 else ""
        seed = f" [seed {self.seed}]" if self.seed else ""
        return f"{self.kind}: {who}: {self.message}{times}{seed}"


class EmulationError(TtnnMoeError, RuntimeError):
    """A program broke rules of the hardware. `findings` lists them."""

    def __init__(self, findings: Sequence[Finding]):
        self.findings = list(findings)
        lines = "\n".join(f"  {finding}" for finding in self.findings[:20])
        more = f"\n  and {len(self.findings) - 20} more" if len(self.findings) > 20 else ""
        super().__init__(f"the emulated program has {len(self.findings)} finding(s):\n{lines}{more}\n")


@dataclass
class Result:
    """Result of one program.

    Args:
        findings: empty if the program broke no rule.
        cores: counters of each core, by (x, y).
        tensors: bytes read and written of each DRAM tensor, by its name in the call.
        prints: lines that kernels printed.
        banks: of each core, the bytes that it read over NoC 0 from each DRAM bank, then those over NoC 1.
        steps: how often the scheduler gave a role its turn.
        seconds: wall time of the engine.
    """

    findings: list[Finding]
    cores: dict[tuple[int, int], dict[str, int]]
    tensors: dict[str, dict[str, int]]
    prints: list[str] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    banks: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def total(self, counter: str) -> int:
        """Sum of a counter over the cores."""
        return sum(core.get(counter, 0) for core in self.cores.values())

    @property
    def cycles(self) -> int:
        """Simulated time of the slowest role: an estimate, see docs/emulator.md."""
        return max((v for core in self.cores.values() for k, v in core.items() if k.endswith("_cycles")), default=0)

    def raise_for_findings(self) -> Result:
        """This result.

        Raises:
            EmulationError: the run has findings.
        """
        if self.findings:
            raise EmulationError(self.findings)
        return self


def result_of(data: dict[str, Any], roots: Sequence[Path], seconds: float, seed: int = 0) -> Result:
    """The engine's JSON as a Result; paths below a root are shortened, raw accesses looked up."""
    findings = []
    for raw in data["findings"]:
        place = f"{raw['file']}:{raw['line']}" if raw["line"] > 0 else _look_up(raw["library"], raw["offset"])
        for root in roots:
            place = place.removeprefix(f"{root}/")
        findings.append(
            Finding(raw["kind"], raw["core"], raw["role"], raw["kernel"], place, raw["message"], raw["count"], seed)
        )
    cores = {(core.pop("x"), core.pop("y")): core for core in data["cores"]}
    banks = {at: core.pop("bank_bytes") for at, core in cores.items()}
    return Result(findings, cores, data["tensors"], data["prints"], data["steps"], seconds, banks)


def _look_up(library: str, offset: int) -> str:
    tool = shutil.which("addr2line")
    if not library or tool is None:
        return ""
    found = subprocess.run([tool, "-e", library, hex(offset)], capture_output=True, text=True, check=False)
    line = found.stdout.strip().splitlines()[0] if found.stdout.strip() else ""
    return "" if line.startswith("??") else re.sub(r" \(discriminator \d+\)$", "", line)
