"""The one error metric and its bounds, and the value that fills an output before a backend writes it."""

from __future__ import annotations

import torch
from torch import Tensor

# relative error of any token, against the oracle with the backend's declared roundings
BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
# any value of it that is left in an output fails every bound
POISON = 1.0e4


def poisoned(*shape: int, dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
    """A tensor full of POISON."""
    return torch.full(shape, POISON, dtype=dtype, device=device)


def token_errors(out: Tensor, want: Tensor) -> Tensor:
    """[T] fp64 relative error of each token, ||out - want|| / ||want||, both [T, H]; NaN or infinity: infinite.

    A token whose sum nearly cancels is measured against a thousandth of the median token's size. A token that must be
    zero (it names no expert) has error 0 or infinity.
    """
    out, want = out.detach().to(want.device).double(), want.double()
    size, difference = want.norm(dim=1), (out - want).norm(dim=1)
    large = size[size.isfinite() & (size > 0)]
    floor = 1e-3 * float(large.median()) if len(large) else 1e-30
    errors = torch.where((size == 0) & (difference > 0), torch.inf, difference / size.clamp_min(floor))
    return errors.nan_to_num(nan=torch.inf, posinf=torch.inf)


def worst_error(out: Tensor, want: Tensor) -> float:
    """The largest of `token_errors`, 0 without a token; infinite where shapes differ.

    A token of want that is not finite passes if out's is not finite either: NaN that went in must come out.
    """
    if out.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    out, want = out.reshape(len(out), -1).to(want.device), want.reshape(len(want), -1)
    spoiled = ~want.isfinite().all(1)
    if bool(out[spoiled].isfinite().all(1).any()):
        return float("inf")
    errors = token_errors(out[~spoiled], want[~spoiled])
    return float(errors.max()) if len(errors) else 0.0
