"""The check that values can be quantised."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ContractError


def check_finite(format: str, name: str, matrices: Tensor) -> None:
    """Raise ContractError if a value of matrices [n, rows, columns], n >= 1, is NaN or infinite, naming the first.

    format: that was to be made of them.
    """
    bad = torch.stack([~matrix.isfinite().all() for matrix in matrices])
    if bool(bad.any()):
        e = int(bad.nonzero()[0])
        row, column = (~matrices[e].isfinite()).nonzero()[0].tolist()
        raise ContractError(
            f"{format} cannot be made of these {name}: not all are finite",
            got=f"{float(matrices[e, row, column])} in matrix {e}, row {row}, channel {column}",
            expected="finite values",
        )
