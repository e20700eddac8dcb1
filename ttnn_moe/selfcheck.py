"""`ttnn-moe selfcheck`: what the owner of a machine runs to learn whether a backend is right on it.

Every operator and every edge of the contract is run on the backend and compared with plain fp32 arithmetic on the
CPU that rounds where the backend says that it rounds. A backend that calls a vendor's operators may bring checks of
its own (`selfchecks()`): they come first. Under torchrun each rank checks its device, and then expert parallelism is
checked; rank 0 says all, the others say what failed.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import __version__, registry
from .backend import Backend
from .errors import BackendUnavailable

DEVICES = ("npu", "cuda", "cpu")
REPEATS = 5


@dataclass(frozen=True)
class Check:
    """One thing to run: it returns what the machine made and what is right, [rows, columns] each.

    bound: relative error allowed in any row; 0 asks for equal values.
    """

    name: str
    run: Callable[[], Tensor]
    want: Callable[[], Tensor]
    bound: float


@dataclass(frozen=True)
class Outcome:
    """What a check gave: error is that of the worst row, microseconds the median of REPEATS runs."""

    name: str
    passed: bool
    error: float | None
    microseconds: float | None
    problem: str = ""

    def __str__(self) -> str:
        verdict = "ok  " if self.passed else "FAIL"
        if self.error is None:
            return f"{verdict} {self.name}: {self.problem}"
        took = "" if self.microseconds is None else f", {self.microseconds:,.0f} us"
        return f"{verdict} {self.name}: error {self.error:.1e}{took}{'; ' + self.problem if self.problem else ''}"


def selfcheck(name: str, print_: Callable[[str], object], dtype: torch.dtype = torch.bfloat16) -> bool:
    """Run all checks of one backend, print each as it ends, and last a line that says what passed.

    Returns:
        Whether all passed, on this rank.

    Raises:
        BackendUnavailable: the backend is not here.
    """
    from .contract_checks import Sizes, checks, problem_of
    from .parallel import selfchecks

    name = registry.resolve(name)
    device = device_of(name, dtype)
    rank, ranks = selfchecks.start(device)
    backend = registry.choose(problem_of(Sizes(), dtype, device), name)

    def say(line: str, always: bool = False) -> None:
        if rank == 0 or always:
            print_(line if ranks == 1 else f"[rank {rank}] {line}")

    for line in (*machine(name, device), *getattr(backend, "versions", list)()):
        say(line)
    outcomes = []
    together = selfchecks.checks(backend, device, dtype) if ranks > 1 else ()
    alone = (*_own_checks(backend), *checks(backend, device, dtype))
    for i, check in enumerate((*alone, *together)):
        outcomes.append(measure(check, device))
        say(str(outcomes[-1]), not outcomes[-1].passed)
        in_step = i < len(alone) or outcomes[-1].error is not None
        if not in_step:
            break  # it raised, and the ranks call these together
    if ranks > 1:
        selfchecks.stop(in_step)
    failed = [outcome.name for outcome in outcomes if not outcome.passed]
    where = f"{name} on {_device_name(name, device)}"
    if failed:
        say(f"FAILED: {where}: {len(failed)} of {len(outcomes)} checks: {', '.join(failed)}", True)
    else:
        say(f"passed: {where}: all {len(outcomes)} checks, {str(dtype).removeprefix('torch.')}")
    return not failed


def device_of(name: str, dtype: torch.dtype) -> str:
    """The first device type that the backend takes tensors on."""
    from .contract_checks import Sizes, problem_of

    reasons = []
    for device in DEVICES:
        reason = registry.why_not(problem_of(Sizes(), dtype, device)).get(name)
        if reason is None:
            return device
        reasons.append(reason)
    raise BackendUnavailable(f"backend {name!r} runs on none of {list(DEVICES)}: {reasons[-1]}")


def machine(name: str, device: str) -> Iterator[str]:
    """Device and versions, a line each."""
    yield f"ttnn-moe {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield f"backend {name} on {device}: {', '.join(registry.probe(name).devices)}"
    from .doctor import PACKAGES, _version

    found = {
        module: torch.__version__ if module == "torch" else _version(module, PACKAGES[module])
        for module in ("torch", "triton", "torch_npu", "ttnn")
    }
    yield ", ".join(f"{module} {version}" for module, version in found.items() if version)


def measure(check: Check, device: str) -> Outcome:
    """Run a check: its error, and then its time. What it raises is a failure with that message."""
    try:
        got = check.run().cpu()
        error = row_error(got, check.want())
        again = check.run().cpu()
        times = [_seconds(check.run, device) for _ in range(REPEATS)]
    except Exception as failure:  # of any kind: the next check is to run
        return Outcome(check.name, False, None, None, f"{type(failure).__name__}: {failure}")
    same = torch.equal(got.contiguous().view(torch.uint8), again.contiguous().view(torch.uint8))
    problem = "" if same else "two runs differ"
    return Outcome(check.name, error <= check.bound and same, error, statistics.median(times) * 1e6, problem)


def row_error(got: Tensor, want: Tensor) -> float:
    """The worst row's relative error; infinite where shapes differ or a NaN is where none belongs."""
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    got, want = got.double().reshape(len(want), -1), want.double().reshape(len(want), -1)
    # a row that must not be finite: that it is not
    bad = ~want.isfinite().all(1)
    if bool((got[bad].isfinite().all(1)).any()):
        return float("inf")
    got, want = got[~bad], want[~bad]
    size = want.norm(dim=1)
    floor = 1e-3 * float(size.median()) if len(size) else 0.0
    errors = (got - want).norm(dim=1) / size.clamp_min(max(floor, 1e-30))
    return float(errors.nan_to_num(nan=float("inf")).max()) if len(errors) else 0.0


def _own_checks(backend: Backend) -> Sequence[Check]:
    own = getattr(backend, "selfchecks", None)
    return own() if own is not None else ()


def _device_name(name: str, device: str) -> str:
    found = registry.probe(name).devices
    return found[0] if found else device


def _seconds(run: Callable[[], Tensor], device: str) -> float:
    synchronize = getattr(getattr(torch, device), "synchronize", None) if device != "cpu" else None
    start = time.perf_counter()
    run()
    if synchronize is not None:
        synchronize()
    return time.perf_counter() - start
