"""Every case of the contract through torch_npu's operators, on CPU implementations of them."""

from __future__ import annotations

import ascend_stand_in
import pytest
import torch
from cases import Target
from test_cases import TestCases, test_bitwise_repeatable  # noqa: F401  (run here on another target)

from ttnn_moe import registry


@pytest.fixture(scope="module", autouse=True)
def _ascend_on_cpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_TARGETS", dict(registry._TARGETS))
        registry.register("ascend", ascend_stand_in.TARGET)
        yield
    registry.register("reference", registry._TARGETS["reference"])  # forgets what was found


@pytest.fixture
def runnable() -> Target:
    return Target("ascend", "cpu", (torch.bfloat16, torch.float16))
