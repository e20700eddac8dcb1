"""Kernels on a GPU, without one: what a refusal of the driver says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ttnn_moe.cuda.jit import load
from ttnn_moe.cuda.jit.spec import Spec
from ttnn_moe.errors import BackendUnavailable

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda.bindings is not installed")
SPEC = Spec.of("common/combine", "sm_90a", TOP_K=8)
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
