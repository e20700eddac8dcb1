"""An operator is a torch form, which defines it, and an ordered list of kernel families. The first that can, runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .accelerator import on
from .cuda import triton_launch

R = TypeVar("R")
TORCH = "torch"

_PLAIN: ContextVar[bool] = ContextVar("plain", default=False)


@contextmanager
def plain() -> Iterator[None]:
    """Run the torch form of every operator, on every device. Tests compare kernels with it."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def why_not_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no kernel takes tensors of this device and dtype, whatever their sizes; None: kernels may."""
    if torch.compiler.is_compiling():
        return "torch.compile traces torch forms"
    if _PLAIN.get():
        return "plain() asks for torch forms"
    return triton_launch.why_not(device, dtype)


@dataclass(frozen=True)
class Family(Generic[R]):
    """One way to run an operator with kernels.

    Attributes:
        name: in a word or two.
        why_not: (device, arguments of the operator) -> why this family cannot run them; None: it can. It reads shapes,
            dtypes, strides and addresses; the tensors may be meta tensors.
        launch: the operator.
    """

    name: str
    why_not: Callable[..., str | None]
    launch: Callable[..., R]


class Operator(Generic[R]):
    """Runs the first family that can, else the torch form. Device and dtype are those of the first argument.

    Args:
        name: as `why` prints it.
        families: in the order in which they are asked.
        form: the definition, in torch.
    """

    def __init__(self, name: str, families: Sequence[Family[R]], form: Callable[..., R]):
        self.name, self.families, self.form = name, tuple(families), form

    def __call__(self, x: Tensor, *args: Any) -> R:
        device = x.device
        if why_not_kernels(device, x.dtype) is None:
            for family in self.families:
                if family.why_not(device, x, *args) is None:
                    with on(device):
                        return family.launch(x, *args)
        return self.form(x, *args)

    def explain(self, device: torch.device, x: Tensor, *args: Any) -> tuple[str, tuple[tuple[str, str], ...]]:
        """What would run these arguments on a device; and each earlier family with the reason why it cannot."""
        reason = why_not_kernels(device, x.dtype)
        refused: list[tuple[str, str]] = []
        for family in self.families:
            why = reason or family.why_not(device, x, *args)
            if why is None:
                return family.name, tuple(refused)
            refused.append((family.name, why))
        return TORCH, tuple(refused)
