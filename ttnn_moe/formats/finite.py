"""The checks that values can be read, and quantised."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ContractError
from ..memory import check_tensors


def check_together(**tensors: Tensor) -> None:
    """Raise ContractError unless all are dense tensors, on one device; it names the first that is not."""
    check_tensors(**tensors)
    first = next(iter(tensors))
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise ContractError(
                f"{name} is not dense", got=tensor.layout, expected="torch.strided", remedy="pass tensor.to_dense()"
            )
        if tensor.device != tensors[first].device:
            raise ContractError(
                f"{first} and {name} are on different devices",
                got=f"{tensors[first].device} and {tensor.device}",
                expected="one device",
            )


def check_readable(**tensors: Tensor) -> None:
    """As check_together, and raise ContractError for tensors on the meta device."""
    check_together(**tensors)
    if any(tensor.is_meta for tensor in tensors.values()):
        raise ContractError(f"{next(iter(tensors))} has no values", got="a meta tensor", expected="values to read")


def comparable(integers: Tensor) -> Tensor:
    """The same integers in a dtype that torch compares. What int64 does not hold, of uint64, becomes negative."""
    return integers.long() if integers.dtype in (torch.uint16, torch.uint32, torch.uint64) else integers


def is_float8(tensor: Tensor) -> bool:
    """Whether values are floats of eight bits or fewer, which torch neither compares nor reduces."""
    return tensor.is_floating_point() and tensor.dtype.itemsize == 1


def check_finite(format: str, name: str, matrices: Tensor) -> None:
    """Raise ContractError if a value of matrices [n, rows, columns], n >= 1, is NaN or infinite, naming the first.

    format: that was to be made of them. Complex values are refused, too: a format holds real ones.
    """
    if matrices.is_complex() or matrices.dtype == torch.bool:
        raise ContractError(f"{name} are no real numbers", got=matrices.dtype, expected="floats")
    if is_float8(matrices):
        raise ContractError(
            f"{name} are in a dtype that torch does not compute in",
            got=matrices.dtype,
            expected="floats of 16 bits or more",
            remedy=f"pass {name}.float(), times the scales of its own",
        )
    bad = torch.stack([~matrix.isfinite().all() for matrix in matrices])
    if bool(bad.any()):
        e = int(bad.nonzero()[0])
        row, column = (~matrices[e].isfinite()).nonzero()[0].tolist()
        raise ContractError(
            f"{format} cannot be made of these {name}: not all are finite",
            got=f"{float(matrices[e, row, column])} in matrix {e}, row {row}, channel {column}",
            expected="finite values",
        )
