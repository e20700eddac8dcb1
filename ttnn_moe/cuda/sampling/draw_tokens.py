"""Tokens of many rows in one launch, each by its own temperature, top-k and top-p: draw_tokens.cu."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32
from functools import lru_cache

import torch
from torch import Tensor

from ...accelerator import upload
from ...draws import Draw
from ..arch import target_of
from ..jit import build, load, spec

NAME = "CUDA C++ draw_tokens"
MAX_VOCABULARY = 1 << 18  # sums of a bin fit a word
THREADS = 1024
BINS, LIST = 2048, 256


def why_not(device: torch.device, logits: Tensor, tokens: Tensor, draws: Sequence[Draw]) -> str | None:
    """Why the kernel does not draw from logits [R, V]; None: it does."""
    if logits.shape[1] % 8 or logits.shape[1] > MAX_VOCABULARY:
        return "the vocabulary is no multiple of 8, or above 2^18"
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return "neither bf16, fp16 nor fp32"
    if tokens.dtype != torch.int64:
        return "tokens are not int64"
    if not logits.is_contiguous() or logits.data_ptr() % 16 or not tokens.is_contiguous():
        return "logits or tokens are not contiguous, or logits not aligned to 16 bytes"
    if device.type != "cuda":
        return "the device is no GPU"
    target = target_of(device)
    return target.reason if target.arch is None else build.why_not()


def launch(logits: Tensor, tokens: Tensor, draws: Sequence[Draw]) -> None:
    """See decoder.draw_tokens."""
    if not draws:
        return
    device = logits.device
    rows = [(one.row, one.uniform, one.temperature, one.top_k, one.top_p) for one in draws]
    how = upload(torch.tensor(rows, dtype=torch.float64).t().contiguous(), device)
    with torch.cuda.device(device):
        _launch(logits.dtype, logits.shape[1], len(draws), device)(
            load.stream(device.index), logits.data_ptr(), how.data_ptr(), tokens.data_ptr()
        )


@lru_cache(maxsize=1024)
def _launch(dtype: torch.dtype, V: int, n: int, device: torch.device) -> load.Launch:
    arch = target_of(device).arch
    assert arch is not None
    blocks = blocks_of(n) if arch.products == "sm90" else 1
    return load.Launch(
        spec_of(arch.name, dtype, blocks),
        device.index,
        (blocks, n),
        THREADS,
        *(c_int32(V), c_int32(n)),
        shared_memory=shared_memory(blocks),
        cluster=blocks,
        overlap=arch.overlaps,
    )


def blocks_of(n: int) -> int:
    """Blocks of each of n rows, where blocks form clusters. By an H100."""
    return next((blocks for most, blocks in ((8, 8), (16, 4), (64, 2)) if n <= most), 1)


def shared_memory(blocks: int) -> int:
    """Bytes of a block: bins, its part of them; lists; bounds, sums of warps, what was found; words."""
    return 20 * BINS + 8 * BINS // blocks + 28 * LIST + 8 * (2 + 64 + 4) + 4 * 4


def spec_of(arch: str, dtype: torch.dtype, blocks: int) -> spec.Spec:
    """The kernel for logits of a dtype."""
    fp16, fp32 = dtype == torch.float16, dtype == torch.float32
    return spec.Spec.of("common/draw_tokens", arch, CLUSTER=blocks, THREADS=THREADS, FP16=fp16, FP32=fp32)
