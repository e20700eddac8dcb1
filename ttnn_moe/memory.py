"""What a kernel that reads addresses must know of a tensor's memory."""

from __future__ import annotations

import torch
from torch import Tensor


def dense(x: Tensor) -> Tensor:
    """x with its elements in row-major order, and with the values that its memory holds: a copy only where needed."""
    return x.resolve_neg().contiguous() if x.is_neg() else x.contiguous()


def first_shared(out: Tensor, *others: Tensor) -> Tensor | None:
    """The first of others that shares memory with out; all are contiguous."""
    first = out.data_ptr()
    end = first + out.nbytes
    for other in others:
        there = other.data_ptr()
        if there < end and first < there + other.nbytes and first:  # meta tensors have no address
            return other
    return None


def note_write(out: Tensor) -> None:
    """Tell autograd that a kernel writes to out: who saved its old values for a backward pass gets torch's error."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
