"""What a call in inference mode keeps also serves calls that record gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ttnn_moe.kv import torch_forms
from ttnn_moe.kv.bucketed import prompts, quantise

CPU = torch.device("cpu")
KEPT: dict[str, tuple[Callable[..., Tensor], tuple[object, ...]]] = {
    "hadamard": (quantise._hadamard, (64, torch.float32, CPU)),
    "later": (prompts._later, (40, 2, CPU)),
    "mask": (torch_forms._mask, (3, 4, CPU)),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_is_no_inference_tensor(name: str) -> None:
    make, arguments = KEPT[name]
    make.cache_clear()  # type: ignore[attr-defined]
    with torch.inference_mode():
        assert not make(*arguments).is_inference()


def test_a_rotation_in_inference_mode_comes_before_one_with_gradients() -> None:
    quantise._hadamard.cache_clear()
    with torch.inference_mode():
        quantise.rotate(torch.randn(3, 64))
    x = torch.randn(3, 64, requires_grad=True)
    quantise.rotate(x).sum().backward()
    assert x.grad is not None
