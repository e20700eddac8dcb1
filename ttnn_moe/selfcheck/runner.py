"""`ttnn-moe selfcheck`: whether a backend is right on this machine.

Every operator and every edge of the contract runs on the backend. The oracle, plain fp32 arithmetic on the CPU with the
roundings that the backend declares, says what is right. The backend's own checks (`ChecksItself`) come first. Under
torchrun each rank checks its device, and then all ranks check expert parallelism together. Rank 0 prints every line,
the other ranks print failures only.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator

import torch

from .. import __version__, registry
from ..backend import ChecksFormats, ChecksItself, NamesVersions
from ..errors import BackendUnavailable
from ..packages import versions
from . import contract_cases, formats, parallel_cases, report
from .check import Check, Outcome, measure

DEVICES = ("npu", "cuda", "cpu")


def selfcheck(
    name: str, print_: Callable[[str], object], dtype: torch.dtype = torch.bfloat16, weight_format: str = formats.DENSE
) -> bool:
    """Run all checks of one backend, print each as it ends, a line to send back, and a line that says what passed.

    Args:
        weight_format: of the experts. Other formats than dense have the backend's checks of the format instead of its
            own checks, the steps and the parallel ones.

    Returns:
        Whether all passed, on this rank.

    Raises:
        BackendUnavailable: the backend is not here, or this rank has no device of its own.
    """
    formats.known(weight_format)
    name = registry.resolve(name)
    device = device_of(name, dtype, weight_format)
    rank, ranks = parallel_cases.start(device)
    backend = registry.choose(contract_cases.plain_problem(dtype, device, weight_format), name)
    dense = weight_format == formats.DENSE

    def say(line: str, always: bool = False) -> None:
        if rank == 0 or always:
            print_(line if ranks == 1 else f"[rank {rank}] {line}")

    about = [*machine(name, device), *(backend.versions() if isinstance(backend, NamesVersions) else ())]
    for line in about:
        say(line)
    outcomes: list[Outcome] = []
    refused: dict[str, str] = {}

    def told(outcome: Outcome) -> bool:
        """Say what a check gave; False if it raised."""
        outcomes.append(outcome)
        say(str(outcome), not outcome.passed)
        return outcome.error is not None

    def in_step(check: Check) -> bool:
        """Run it and say what it gave; False if it raised."""
        if check.refused:
            say(f"none {check.name}: {check.refused}")
            refused[check.name] = check.refused
            return True
        return told(measure(check, device))

    def each(of: str, found: Iterable[Check | Outcome | str]) -> None:
        """Run checks and say what they gave. What ends their list early, such as a lost device, is a failure too."""
        try:
            for one in found:
                if isinstance(one, str):
                    say(one)
                elif isinstance(one, Outcome):
                    told(one)
                else:
                    in_step(one)
        except Exception as failure:  # of any kind: the report is to be printed
            told(Outcome(f"the other checks of {of}", False, None, None, f"{type(failure).__name__}: {failure}"))

    if dense and isinstance(backend, ChecksItself):
        each(name, backend.selfchecks())
    if isinstance(backend, ChecksFormats):
        each(weight_format, backend.format_checks(weight_format))
    each("the contract", contract_cases.checks(backend, device, dtype, weight_format))
    in_turn = True
    if dense:
        each("expert parallelism", parallel_cases.refusals(backend, dtype))
    if dense and ranks > 1:
        # ranks call these together: one that raised cannot go on
        in_turn = all(map(in_step, parallel_cases.checks(backend, device, dtype)))
    failed = [outcome.name for outcome in outcomes if not outcome.passed]
    of_ranks = [failed] if ranks == 1 else parallel_cases.stop(in_turn, failed) if dense else None
    say(
        report.line(
            about,
            outcomes,
            refused,
            of_ranks,
            backend=name,
            device=device,
            dtype=str(dtype).removeprefix("torch."),
            weights=weight_format,
            ranks=ranks,
        )
    )
    where = f"{name} on {_device_name(name, device)}"
    if failed:
        say(f"FAILED: {where}: {len(failed)} of {len(outcomes)} checks: {', '.join(failed)}", True)
    else:
        kind = str(dtype).removeprefix("torch.") + f", {weight_format} weights" * (not dense)
        say(f"passed: {where}: all {len(outcomes)} checks, {kind}")
    return not failed


def device_of(name: str, dtype: torch.dtype, weight_format: str = formats.DENSE) -> str:
    """The first device type that the backend takes tensors on."""
    reasons = []
    for device in DEVICES:
        reason = registry.why_not(contract_cases.plain_problem(dtype, device, weight_format)).get(name)
        if reason is None:
            return device
        reasons.append(reason)
    raise BackendUnavailable(
        f"backend {name!r} runs on none of {list(DEVICES)}: {reasons[-1]}", remedy="ttnn-moe doctor lists what is here"
    )


def machine(name: str, device: str) -> Iterator[str]:
    """Device and versions, a line each."""
    yield f"ttnn-moe {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield f"backend {name} on {device}: {', '.join(registry.probe(name).devices)}"
    found = versions("torch", "triton", "torch_npu", "ttnn")
    yield ", ".join(f"{module} {version}" for module, version in found.items() if version)


def _device_name(name: str, device: str) -> str:
    found = registry.probe(name).devices
    return found[0] if found else device
