"""An assertion over the package's error metric."""

from __future__ import annotations

import torch
from torch import Tensor

from ttnn_moe.selfcheck.bounds import BOUND, token_errors


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
