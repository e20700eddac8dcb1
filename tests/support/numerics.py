"""The one error metric, and poisoned outputs."""

from __future__ import annotations

import torch
from torch import Tensor

# per token, against the oracle with the backend's declared roundings
BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
# what an output holds before a backend writes it: any value left of it fails every bound
POISON = 1.0e4


def poisoned(*shape: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.full(shape, POISON, dtype=dtype, device=device)


def token_errors(out: Tensor, want: Tensor) -> Tensor:
    """[T] relative error of each token, ||out - want|| / ||want||; NaN counts as infinite.

    A token whose sum nearly cancels is measured against a thousandth of the median token's size.
    """
    out, want = out.detach().cpu().double(), want.double()
    if not len(want):
        return want.new_zeros(0)
    size = want.norm(dim=1)
    floor = 1e-3 * size[size > 0].median() if bool((size > 0).any()) else torch.tensor(1e-30)
    errors = (out - want).norm(dim=1) / size.clamp_min(floor)
    return errors.nan_to_num(nan=float("inf"))


def assert_close(out: Tensor, want: Tensor, dtype: torch.dtype, what: str = "out") -> None:
    """Every token of out must be within the bound of the dtype."""
    assert out.shape == want.shape, f"{what}: shape {tuple(out.shape)}, wanted {tuple(want.shape)}"
    errors = token_errors(out, want)
    if len(errors) and float(errors.max()) > BOUND[dtype]:
        t = int(errors.argmax())
        raise AssertionError(
            f"{what}: token {t} is off by {float(errors[t]):.3e} (bound {BOUND[dtype]:.0e}), "
            f"{int((errors > BOUND[dtype]).sum())} of {len(errors)} tokens are"
        )
