"""A decode step's attention in units that end at about the same time: gpu_kernels/cuda/common/decode_units.cu."""

from __future__ import annotations

from ctypes import c_int32
from functools import lru_cache

import torch
from torch import Tensor

from ...sizes import ceil_div
from .. import device as devices
from ..arch import HOPPER, why_not_hopper
from ..jit import load, spec

MOST = 1024
"""Tokens of a step, at most."""

LEAST = 512
"""Keys of a part of a row, at least."""

TILE = 16
SPEC = spec.Spec.of("common/decode_units", HOPPER.name)
SHARED_MEMORY = 8 * MOST + 8 * MOST // 32


LONG = 4096
"""Tokens of a row from which on one long row may keep a step waiting, whatever the others are."""


def serves(T: int, kv_heads: int, capacity: int, device: torch.device) -> bool:
    """Whether decode_sm90 of T tokens in rows of up to `capacity` gains by units.

    It does where blocks wait for others to end; and in long caches, unless clusters share the rows of few tokens.
    """
    if not 1 < T <= MOST or why_not_hopper(device) is not None:
        return False
    pairs, multiprocessors = T * kv_heads, devices.gpu(device).multiprocessors
    return pairs > 2 * multiprocessors or (capacity > LONG and 3 * pairs > 2 * multiprocessors)


def extra(kv_heads: int, device: torch.device) -> int:
    """Units that a step may have besides one a token: two blocks a multiprocessor."""
    return ceil_div(2 * devices.gpu(device).multiprocessors, kv_heads)


def launch(
    positions: Tensor,
    num_tokens: Tensor | None,
    capacity: int,
    more: int,
    out: Tensor | None = None,
    least: int = LEAST,
) -> Tensor:
    """Memory.units [T + more, 4] of a step, for positions [T] int64 of rows that hold `capacity` tokens.

    Args:
        num_tokens: [] int32; tokens from it on have no keys. more: of `extra`.
        out: [n, 4] int32 with n from T + more on, to write to. least: keys of a part of a row, at least.
    """
    T, device = len(positions), positions.device
    out = torch.empty(T + more, 4, dtype=torch.int32, device=device) if out is None else out[: T + more]
    with torch.cuda.device(device):
        _launch(T, capacity, least, more, device.index)(
            load.stream(device.index), positions.data_ptr(), load.pointer(num_tokens), out.data_ptr()
        )
    return out


@lru_cache(maxsize=1024)
def _launch(T: int, capacity: int, least: int, more: int, device: int) -> load.Launch:
    sizes = map(c_int32, (T, capacity, ceil_div(least, TILE), more, T + more))
    return load.Launch(SPEC, device, (1,), MOST, *sizes, shared_memory=SHARED_MEMORY)
