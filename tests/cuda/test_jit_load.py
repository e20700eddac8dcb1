"""Kernels on a GPU, without one: how code is loaded, and what a refusal of the driver says."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ttnn_moe.cuda.jit import load
from ttnn_moe.cuda.jit.spec import Spec
from ttnn_moe.errors import BackendUnavailable

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda.bindings is not installed")
SPEC = Spec.of("common/combine", "sm_90a", TOP_K=8)
PTX = Spec.of("common/combine", "compute_80", TOP_K=8)
MEMORY = "MAX_DYNAMIC_SHARED_SIZE_BYTES"


def test_a_refusal_names_the_kernel_the_attribute_and_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    status, given = driver.CUresult.CUDA_ERROR_INVALID_VALUE, []

    def refuse(*arguments: Any) -> tuple[Any]:
        given.append(arguments)
        return (status,)

    monkeypatch.setattr(driver, "cuKernelSetAttribute", refuse)
    words = f"refused {MEMORY}=300000 of common/combine for sm_90a .TOP_K=8. on GPU 1; got CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(BackendUnavailable, match=words) as told:
        load._set(SimpleNamespace(handle=7), SPEC, 1, MEMORY, 300_000)
    assert told.value.remedy is not None
    assert given == [(driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 300_000, 7, 1)]
    status = driver.CUresult.CUDA_SUCCESS
    load._set(SimpleNamespace(handle=7), SPEC, 1, MEMORY, 300_000)


class Core:
    """cuda.core of a driver that takes machine code and no PTX."""

    def __init__(self) -> None:
        self.ObjectCode = SimpleNamespace(from_cubin=self._cubin, from_ptx=self._ptx)

    def Device(self, device: int) -> Any:
        return SimpleNamespace(set_current=lambda: None)

    def _cubin(self, code: bytes, name: str) -> Any:
        return SimpleNamespace(get_kernel=lambda entry: SimpleNamespace(handle=(code, entry)))

    def _ptx(self, code: bytes, name: str) -> Any:
        raise RuntimeError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION: the provided PTX\nwas compiled with an unsupported one")


@pytest.fixture
def attributes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is set of kernels that Core loads."""
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(load, "cuda_core", Core)
    monkeypatch.setattr(load, "code_of", lambda spec: b"code")
    monkeypatch.setattr(load, "compiler", lambda: "nvrtc 13.4")
    monkeypatch.setattr(load, "_set", lambda kernel, *rest: given.append(rest))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return given


@pytest.mark.parametrize("memory", [40 << 10, (40 << 10) + 1])
def test_shared_memory_past_the_usual_limit_is_asked_for(memory: int, attributes: list[tuple[Any, ...]]) -> None:
    assert load.kernel.__wrapped__(SPEC, 1, memory).handle == (b"code", "combine")
    assert attributes == [(SPEC, 1, MEMORY, memory)] * (memory > 40 << 10)
    load.kernel.__wrapped__(SPEC, 1, 0, load.HALF)
    assert attributes[-1] == (SPEC, 1, "PREFERRED_SHARED_MEMORY_CARVEOUT", 50)


def test_code_that_an_older_driver_does_not_take(attributes: list[tuple[Any, ...]]) -> None:
    with pytest.raises(BackendUnavailable) as told:
        load.kernel.__wrapped__(PTX, 0)
    assert "refused common/combine for compute_80 (TOP_K=8) on GPU 0; got CUDA_ERROR_UNSUPPORTED_PTX" in str(told.value)
    assert "an unsupported one (code of nvrtc 13.4); to fix it: update the NVIDIA driver" in str(told.value)
    assert "\n" not in str(told.value)


def test_a_kernel_stays_loaded(attributes: list[tuple[Any, ...]]) -> None:
    """cuda.core unloads code that nobody holds, and a captured graph holds none."""
    own = lru_cache(**load.kernel.cache_parameters())(load.kernel.__wrapped__)
    first = own(SPEC, 0)
    for size in range(1, 5000):
        own(SPEC, 0, size)
    assert own(SPEC, 0) is first
