"""Where the tokens of a step reach the host while it does something else."""

from __future__ import annotations

import torch
from torch import Tensor

from ttnn_moe.accelerator import is_accelerator, module_of


class Landing:
    """Pinned host memory that the tokens of a step reach while the host goes on. It implements runner.Pending."""

    def __init__(self, size: int, device: torch.device):
        behind = is_accelerator(device)
        self._memory, self._n = torch.empty(size, dtype=torch.int64, pin_memory=behind), 0
        self._begun, self._over = (module_of(device).Event(enable_timing=True) if behind else None for _ in range(2))

    def begin(self) -> Landing:
        """The step is what the device does between this and `send`."""
        if self._begun is not None:
            self._begun.record()
        return self

    def send(self, tokens: Tensor) -> Landing:
        """The step ends with these."""
        self._n = len(tokens)
        self._memory[: self._n].copy_(tokens, non_blocking=True)
        if self._over is not None:
            self._over.record()
        return self

    def tokens(self) -> list[int]:
        if self._over is not None:
            self._over.synchronize()
        return self._memory[: self._n].tolist()

    def seconds(self) -> float:
        if self._begun is None or self._over is None:
            return 0.0
        return self._begun.elapsed_time(self._over) / 1e3
