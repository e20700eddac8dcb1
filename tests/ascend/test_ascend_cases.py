"""Every case of the contract through torch_npu's operators, on CPU implementations of them."""

from __future__ import annotations

import pytest
import torch

import ascend_stand_in
from contract_cases import TestCases, test_bitwise_repeatable  # noqa: F401  (run here on another target)
from targets import Target


@pytest.fixture(scope="module", autouse=True)
def _ascend_on_cpu():
    with ascend_stand_in.registered():
        yield


@pytest.fixture
def runnable() -> Target:
    return Target("ascend", "cpu", (torch.bfloat16, torch.float16))
