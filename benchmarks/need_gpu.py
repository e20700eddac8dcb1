"""Where a benchmark of GPUs finds none: one line, not a traceback."""

from __future__ import annotations

import torch


def need_gpu(device: str = "cuda") -> None:
    """End with one line where torch finds no GPU, unless the device is another."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU: torch finds none")
