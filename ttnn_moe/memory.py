"""What a kernel that reads addresses must know of a tensor's memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .errors import ContractError
from .visible import shown


def check_layout(x: Tensor) -> None:
    """Raise ContractError for a sparse tensor, or one of another layout that has no row-major order."""
    if x.layout is not torch.strided:
        raise ContractError(
            "a tensor is not dense", got=str(x.layout), expected="torch.strided", remedy="pass tensor.to_dense()"
        )


def dense(x: Tensor) -> Tensor:
    """x with its elements in row-major order, and with the values that its memory holds: a copy only where needed.

    Raises:
        ContractError: a sparse tensor, or one of another layout that has no row-major order.
    """
    check_layout(x)
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


def states(tensors: Iterable[Tensor]) -> list[tuple[int | None, int]]:
    """What differs after a change of the values: torch counts those in place, and `.data = x` gives another address.

    Two changes are not seen: of inference tensors, which torch does not count, and through `.data`.
    """
    return [(None if tensor.is_inference() else tensor._version, tensor.data_ptr()) for tensor in tensors]


def check_tensors(**values: object) -> None:
    """Raise ContractError, naming the first of values that is no tensor, a nested one, one spread over a device mesh
    (DTensor), or one that only wraps others."""
    for name, value in values.items():
        if type(value) is Tensor and not value.is_nested:
            continue
        if not isinstance(value, Tensor):
            raise ContractError(f"{name} is no tensor", got=shown(value), expected="a torch tensor")
        if value.is_nested:
            raise ContractError(
                f"{name} is a nested tensor",
                got="tensors of several shapes",
                expected="a torch tensor of one shape",
                remedy="torch.cat(tensor.unbind())",
            )
        if hasattr(value, "to_local"):
            raise ContractError(
                f"{name} is a DTensor",
                got=shown(value),
                expected="a torch tensor of this process",
                remedy="pass tensor.to_local(), or make the layer with ttnn_moe.parallel.ExpertParallel",
            )
        if not torch.compiler.is_compiling() and not _in_memory(value):
            raise ContractError(
                f"{name} is a tensor without memory of its own",
                got=f"a {type(value).__name__}",
                expected="a torch tensor whose elements lie in memory",
                remedy="pass the tensor that it wraps, or tensor.dequantize()",
            )


def _in_memory(tensor: Tensor) -> bool:
    """Whether a tensor has an address, as far as it should: tracers' tensors and those on meta have none."""
    if type(tensor).__module__.startswith("torch._subclasses"):
        return True
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may answer otherwise, or not at all
        nowhere = tensor.device.type == "meta" or tensor.layout is not torch.strided or not tensor.numel()
        return nowhere or tensor.data_ptr() != 0
