"""What a kernel that reads addresses must know of a tensor's memory."""

from __future__ import annotations

import torch
from torch import Tensor


def dense(x: Tensor) -> Tensor:
    """x with its elements in row-major order, and with the values that its memory holds: a copy only where needed."""
    return x.resolve_neg().contiguous() if x.is_neg() else x.contiguous()


def overlap(out: Tensor, x: Tensor) -> bool:
    """Whether a contiguous tensor shares memory with another."""
    first, there = out.data_ptr(), x.data_ptr()
    return first != 0 and there < first + out.nbytes and first < there + _extent(x)


def _extent(x: Tensor) -> int:
    """Bytes from the first element of x to the end of its last."""
    if x.is_contiguous():
        return x.nbytes
    if not x.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (steps + 1) * x.element_size()


def note_write(out: Tensor) -> None:
    """Tell autograd that a kernel writes to out: who saved its old values for a backward pass gets torch's error."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
