"""Choosing a backend: named, automatic, by environment; and what is said when one cannot run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from own_registry import own_registry
from processes import run_python
from ttnn_moe import BackendUnavailable, Problem, registry
from ttnn_moe.backend import Backend, Probe
from ttnn_moe.reference import ReferenceBackend

PROBLEM = Problem(4, 8, 2, 64, 64, torch.float32)


class Picky(ReferenceBackend):
    """Refuses all but T = 1."""

    name = "picky"

    def why_not(self, problem: Problem) -> str | None:
        return None if problem.T == 1 else "it runs T = 1 only"


class Mine(ReferenceBackend):
    name = "mine"


class Absent(ReferenceBackend):
    name = "absent"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(False, "there is no such card here", "plug one in")


class Elsewhere(ReferenceBackend):
    """Takes tensors of another device only."""

    name = "elsewhere"

    def why_not(self, problem: Problem) -> str | None:
        return None if problem.device == "cuda" else "the tensors are not there"


class Broken(ReferenceBackend):
    name = "broken"

    @classmethod
    def probe(cls) -> Probe:
        raise OSError("libfoo.so: cannot open")


@pytest.fixture
def others() -> Iterator[None]:
    """Three more backends."""
    with own_registry() as register:
        for name in ("Broken", "Absent", "Picky"):
            register(name.lower(), f"{__name__}:{name}")
        yield


def test_reference_is_always_here() -> None:
    assert "reference" in registry.backends()
    assert registry.probe("reference").available
    assert isinstance(registry.choose(PROBLEM, "reference"), Backend)


def test_auto_takes_the_first_that_can(others) -> None:
    assert registry.backends()[:3] == ["picky", "absent", "broken"]
    assert registry.choose(Problem(1, 8, 2, 64, 64, torch.float32)).name == "picky"
    assert registry.choose(PROBLEM).name == "reference"


def test_a_choice_is_made_again_with_a_new_backend() -> None:
    with own_registry() as register:
        assert registry.choose(PROBLEM).name == "reference"
        register("mine", f"{__name__}:Mine")
        assert registry.choose(PROBLEM).name == "mine"


def test_why_not_lists_reasons_and_remedies(others) -> None:
    assert registry.why_not().keys() >= {"absent", "broken"}
    reasons = registry.why_not(PROBLEM)
    assert reasons["picky"] == "it runs T = 1 only"
    assert reasons["absent"] == "there is no such card here; to fix it: plug one in"
    assert "OSError: libfoo.so" in reasons["broken"]
    assert "reference" not in reasons


def test_a_named_backend_never_falls_back(others) -> None:
    for name, reason in (("picky", "T = 1 only"), ("absent", "plug one in"), ("broken", "libfoo")):
        with pytest.raises(BackendUnavailable, match=reason) as error:
            registry.choose(PROBLEM, name)
        assert repr(name) in str(error.value)
        assert "ask for a backend that can: reference" in str(error.value)
        assert str(error.value).count("to fix it") == 1


def test_a_named_backend_where_none_can() -> None:
    with pytest.raises(BackendUnavailable, match="on 'xpu'.*move them to the CPU\\.$"):
        registry.choose(Problem(1, 2, 1, 8, 8, device="xpu"), "reference")


def test_meta_tensors_are_told_what_can_be_done() -> None:
    """They cannot be moved to the CPU."""
    reason = registry.why_not(Problem(1, 2, 1, 8, 8, device="meta"))["reference"]
    assert "meta tensors have no values; to fix it: make them on the CPU" in reason


def test_unknown_name_lists_the_known() -> None:
    for call in (registry.choose, lambda _, name: registry.resolve(name)):
        with pytest.raises(BackendUnavailable, match="reference"):
            call(PROBLEM, "cdua")


def test_environment_names_the_default(others, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTNN_MOE_BACKEND", "absent")
    with pytest.raises(BackendUnavailable, match="no such card"):
        registry.choose(PROBLEM)
    with pytest.raises(BackendUnavailable, match="no such card"):
        registry.resolve()
    assert registry.choose(PROBLEM, "reference").name == "reference", "an explicit name wins"
    monkeypatch.setenv("TTNN_MOE_BACKEND", "reference")
    assert registry.resolve() == "reference"
    monkeypatch.delenv("TTNN_MOE_BACKEND")
    assert registry.resolve() == "picky"


def test_nothing_can_run_it() -> None:
    with pytest.raises(BackendUnavailable, match="the tensors are on 'xpu'") as error:
        registry.choose(Problem(1, 2, 1, 8, 8, device="xpu"))
    first, *lines = str(error.value).splitlines()
    assert "got T=1, E=2, K=1, H=8, I=8, bfloat16, dense weights, on xpu" in first
    assert [line.partition(":")[0].strip() for line in lines] == registry.backends()


def test_backends_load_when_first_asked_for() -> None:
    """Importing the package imports no backend."""
    code = "import sys, ttnn_moe; print([m for m in sys.modules if m in ('ttnn_moe.reference', 'triton', 'ttnn')])"
    assert run_python("-c", code).stdout.strip() == "[]"


def test_auto_names_a_backend_of_the_device() -> None:
    """Where a GPU is, and the model is on the CPU."""
    with own_registry() as register:
        register("elsewhere", f"{__name__}:Elsewhere")
        assert registry.resolve() == registry.resolve("auto", "cuda") == "elsewhere"
        assert registry.resolve("auto", "cpu") == "reference"
        assert registry.resolve("elsewhere", "cpu") == "elsewhere"  # asked for by name
