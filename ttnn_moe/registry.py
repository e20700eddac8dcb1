"""The table of backends: found by name, loaded when first asked for, chosen by what they can run.

TTNN_MOE_BACKEND names the backend that "auto" must use.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from functools import cache, lru_cache

from loguru import logger

from .backend import Backend, Explains, Probe
from .contract import HIDDEN_DTYPES, Problem, check_kind, too_many_pairs
from .errors import BackendUnavailable, ContractError
from .visible import said, shown

# in the order in which "auto" tries them
_TARGETS: dict[str, str] = {
    "cuda": "ttnn_moe.cuda.backend:CudaBackend",
    "tenstorrent": "ttnn_moe.tenstorrent.backend:TenstorrentBackend",
    "ascend": "ttnn_moe.ascend.backend:AscendBackend",
    "reference": "ttnn_moe.reference:ReferenceBackend",
}

AUTO = "auto"
ENV = "TTNN_MOE_BACKEND"


def backends() -> list[str]:
    """Names of all backends, in the order in which "auto" tries them."""
    return list(_TARGETS)


def register(name: str, target: str) -> None:
    """Add a backend, or replace one: target is "module:Class" and is imported when first asked for.

    A new name is tried by "auto" before the ones that are there.
    """
    global _TARGETS
    _TARGETS = {name: target, **{n: t for n, t in _TARGETS.items() if n != name}}
    for cached in (_class, _instance):
        cached.cache_clear()
    look_again()


def look_again() -> None:
    """Forget what this machine was found to have: a device was opened or closed, a package installed."""
    probe.cache_clear()
    _choose.cache_clear()


@cache
def _class(name: str) -> type[Backend]:
    module, _, attribute = _TARGETS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


@cache
def _instance(name: str) -> Backend:
    return _class(name)()


@cache
def probe(name: str) -> Probe:
    """Whether a backend can run on this machine. Never raises for a known name; the answer is kept.

    Raises:
        BackendUnavailable: no backend of that name.
    """
    if name not in _TARGETS:
        raise _no_such(repr(name))
    try:
        return _class(name).probe()
    except Exception as error:  # a broken optional package must not take the others down
        return Probe(False, f"its probe failed: {said(error)}")


def why_not(problem: Problem | None = None) -> dict[str, str]:
    """For each backend that cannot run the problem (or, without one, anything here): the reason and the remedy."""
    return {name: reason for name in _TARGETS if (reason := _reason(name, problem)) is not None}


@dataclass(frozen=True)
class Row:
    """One backend's answer to a problem.

    Attributes:
        verdict: "runs" (this one is chosen), "could" (if asked for by name) or "cannot".
        words: the kernels that run it, as far as the backend names them; or the reason and the remedy.
    """

    backend: str
    verdict: str
    words: str = ""

    def __str__(self) -> str:
        if self.verdict == "runs":
            return f"{self.backend} runs it" + (f", with {self.words}" if self.words else "")
        if self.verdict == "could":
            return f"{self.backend} could, if asked for"
        return f"{self.backend} does not: {self.words}"


@dataclass(frozen=True)
class Why:
    """What runs a problem here and why nothing else does. Its text form has a line for each row.

    Attributes:
        rows: one for each backend; first the one that runs it, or that was asked for.
    """

    rows: tuple[Row, ...]

    @property
    def chosen(self) -> str | None:
        """The backend that runs it; None: nothing does."""
        return next((row.backend for row in self.rows if row.verdict == "runs"), None)

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows))


def why(problem: Problem, name: str = AUTO) -> Why:
    """What runs a problem here, and for each other backend why it does not.

    Args:
        problem: what would run.
        name: a backend, or "auto": the one that TTNN_MOE_BACKEND names, else the first that can.

    Returns:
        `rows`, one a backend, and `chosen`, the backend or None: a problem that nothing runs is an answer, too.

    Raises:
        ContractError: no Problem, or name is no text. BackendUnavailable: no backend of that name.
    """
    check_kind(problem, Problem)
    asked = asked_for(name)
    if asked != AUTO:
        probe(asked)  # raises for a name that is none
    reasons = {other: _reason(other, problem) for other in _TARGETS}
    first = next((other for other in _TARGETS if reasons[other] is None), "") if asked == AUTO else asked

    def row(other: str) -> Row:
        reason = reasons[other]
        if reason is not None:
            return Row(other, "cannot", reason)
        if other != first:
            return Row(other, "could")
        chosen = _instance(other)
        return Row(other, "runs", chosen.kernels(problem) if isinstance(chosen, Explains) else "")

    return Why(tuple(row(other) for other in sorted(_TARGETS, key=lambda other: other != first)))


def check_name(name: object) -> None:
    """Raise ContractError unless name is a text, as the name of a backend is."""
    if not isinstance(name, str):
        raise ContractError("backend is no name", got=shown(name), expected=f"one of {[AUTO, *_TARGETS]}")


def asked_for(name: str) -> str:
    """The backend of a name, or AUTO.

    Raises:
        ContractError: name is no text. BackendUnavailable: TTNN_MOE_BACKEND names no backend.
    """
    check_name(name)
    if name != AUTO:
        return name
    found = os.environ.get(ENV) or AUTO
    if found not in (AUTO, *_TARGETS):
        raise _no_such(f"{shown(found)}, of {ENV}", f"correct or unset {ENV}")
    return found


def _no_such(got: str, remedy: str | None = None) -> BackendUnavailable:
    return BackendUnavailable("no such backend", got=got, expected=f"one of {[AUTO, *_TARGETS]}", remedy=remedy)


def _of_environment(name: str) -> str:
    """What a remedy adds where the environment names this backend."""
    return f"; {ENV} names {name}" if os.environ.get(ENV) == name else ""


def _reason(name: str, problem: Problem | None) -> str | None:
    found = probe(name)
    if not found.available:
        return found.reason + (f"; to fix it: {found.remedy}" if found.remedy else "")
    return None if problem is None else too_many_pairs(problem) or _instance(name).why_not(problem)


def choose(problem: Problem, name: str = AUTO) -> Backend:
    """The backend to run a problem: the one named, or the first that can.

    Args:
        problem: what is to run.
        name: a backend, or "auto": then TTNN_MOE_BACKEND if set, else the first in `backends()` that can.

    Raises:
        BackendUnavailable: which was asked, why it cannot, and which others could. ContractError: name is no text.
    """
    return _choose(problem, asked_for(name))


@lru_cache(maxsize=4096)  # a problem names its T, and callers' T vary
def _choose(problem: Problem, name: str) -> Backend:
    if name == AUTO:
        rejected: dict[str, str] = {}
        for candidate in _TARGETS:
            reason = _reason(candidate, problem)
            if reason is None:
                logger.debug("auto chose backend {} for {}; rejected: {}", candidate, problem, rejected or "none")
                return _instance(candidate)
            rejected[candidate] = reason
        raise BackendUnavailable(
            "no backend can run this problem",
            got=problem,
            remedy="`ttnn-moe doctor` lists what is here",
            details=[f"{candidate}: {reason}" for candidate, reason in rejected.items()],
        )
    reason = _reason(name, problem)
    if reason is None:
        return _instance(name)
    able = [other for other in _TARGETS if other != name and _reason(other, problem) is None]
    raise BackendUnavailable(
        f"backend {name!r} cannot run here: {reason}",
        remedy=f"ask for a backend that can: {' or '.join(able)}{_of_environment(name)}" if able else None,
    )


def resolve(name: str = AUTO, device: str | None = None) -> str:
    """The name of the backend that a model should ask for: checks that it is here, before any work.

    Args:
        name: as in `choose`. device: the type of the tensors' device: "auto" is then the first that takes
            them there. Where none does, it is the first that is here, which refuses them and says why.

    Raises:
        BackendUnavailable: not here, or no such backend.
    """
    name = asked_for(name)
    if name == AUTO:
        here = [candidate for candidate in _TARGETS if probe(candidate).available]
        if device is None:
            return here[0]
        # any that it runs: sizes are multiples of what a backend may ask for
        small = [Problem(T=1, E=8, K=1, H=512, I=512, dtype=dtype, device=device) for dtype in HIDDEN_DTYPES]
        able = (one for one in here if any(_instance(one).why_not(problem) is None for problem in small))
        return next(able, here[0])
    found = probe(name)
    if not found.available:
        here = [other for other in _TARGETS if probe(other).available]
        raise BackendUnavailable(
            f"backend {name!r} is not available: {found.reason}",
            expected=f"one that is here: {here}",
            remedy=found.remedy or None,
        )
    return name
