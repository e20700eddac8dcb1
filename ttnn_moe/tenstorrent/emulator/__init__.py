"""Tensix programs on the host: native kernels run on a model of one chip, which checks and counts."""

from .chip import CHIPS, ChipModel
from .dram import EmulatedChip, Tensor
from .program import CircularBuffer, ComputeConfig, Kernel, Placeholder, Program, Semaphore
from .result import EmulationError, Finding, Result
from .run import run

__all__ = [
    "CHIPS",
    "ChipModel",
    "CircularBuffer",
    "ComputeConfig",
    "EmulatedChip",
    "EmulationError",
    "Finding",
    "Kernel",
    "Placeholder",
    "Program",
    "Result",
    "Semaphore",
    "Tensor",
    "run",
]
