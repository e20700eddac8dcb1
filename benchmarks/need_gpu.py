"""Where a benchmark of GPUs finds none, or one of vLLM no vLLM: one line, not a traceback."""

from __future__ import annotations

from importlib.util import find_spec

import torch


def need_gpu(device: str = "cuda") -> None:
    """End with one line where torch finds no GPU, unless the device is another."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU: torch finds none")


def need_vllm() -> None:
    """End with one line where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise SystemExit("this benchmark needs vLLM: pip install vllm==0.22.1, the version that ran on GPUs")
