"""Norm, logits and choice of experts on Hopper in one launch: gpu_kernels/cuda/sm90/norm_route.cu.

The norm may be left out: rows are normalised already then.
"""

from __future__ import annotations

from ctypes import c_float, c_int32
from functools import lru_cache

import torch
from torch import Tensor

from ...sizes import ceil_div
from ..arch import HOPPER, why_not_hopper, why_not_words
from ..jit import load, pool, spec

NAME = "CUDA C++ norm_route (sm_90a)"
MAX_TOKENS = 160
MOST_SINGLE = 96
"""Tokens up to which a cluster takes one group of eight. Above, clusters take two, and do not come in two waves."""
MOST = (MAX_TOKENS, MOST_SINGLE)
"""Tokens up to which the kernel serves: the first of these that it takes, by H and E."""

SLICE, TILE = 512, 128  # of H and of E
MOST_SLICES = 8  # of the weight of all experts, as registers hold it
MOST_SLICES_OF_TWO = 4  # the same where clusters take two groups
MAX_K = 16
CLUSTER, THREADS, TOKENS = 8, 512, 8  # blocks of a cluster; threads of a block; tokens of a group


def why_not(
    device: torch.device, x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, K: int, renormalise: bool
) -> str | None:
    """Why the kernel does not route x [T, H] by weight [E, H]; None: it does. norm: as launch."""
    T, (E, H) = x.shape[0], weight.shape
    if not 0 < T <= MAX_TOKENS:
        return f"not 1 to {MAX_TOKENS} rows"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return "neither bf16 nor fp16"
    if T > MOST_SINGLE and H // SLICE * (E // TILE) > MOST_SLICES_OF_TWO:
        return f"not 1 to {MOST_SINGLE} rows, with H * E above 2048 * 128"
    if H % SLICE or E not in (TILE, 2 * TILE) or H // SLICE * (E // TILE) > MOST_SLICES:
        return "H is no multiple of 512, E is neither 128 nor 256, or H * E is above 4096 * 128"
    if K > MAX_K:
        return "K is above 16"
    return why_not_words(x.dtype, x, weight if norm is None else norm, weight) or why_not_hopper(device)


def launch(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, K: int, renormalise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """ids and weights [T, K] of x [T, H], and x normalised. norm: [H]; None: x is normalised already."""
    (T, H), E = x.shape, weight.shape[0]
    ids, weights = x.new_empty(T, K, dtype=torch.int32), x.new_empty(T, K, dtype=torch.float32)
    normed, device = x if norm is None else torch.empty_like(x), x.device.index
    with torch.cuda.device(x.device):
        _launch(x.dtype, H, E, K, renormalise, norm is not None, T, eps, device)(
            load.stream(device),
            *(x.data_ptr(), load.pointer(norm), weight.data_ptr()),
            *(0 if norm is None else normed.data_ptr(), ids.data_ptr(), weights.data_ptr()),
        )
    return ids, weights, normed


@lru_cache(maxsize=1024)
def _launch(
    dtype: torch.dtype, H: int, E: int, K: int, renormalise: bool, norm: bool, T: int, eps: float, device: int
) -> load.Launch:
    return load.Launch(
        spec_of(dtype, H, E, K, renormalise, groups(T), norm),
        device,
        (CLUSTER * ceil_div(T, TOKENS * groups(T)),),
        THREADS,
        *(c_float(eps), c_int32(T)),
        shared_memory=shared_memory(E, groups(T)),
        carveout=load.HALF,
        cluster=CLUSTER,
        overlap=True,
    )


def compile_ahead(weight: Tensor, K: int, renormalise: bool) -> int:
    """Compile the kernels without a norm that the store lacks; the most tokens that they serve. 0: none serves."""
    (E, H), device = weight.shape, weight.device
    tokens = [T for T in MOST if why_not(device, weight.new_empty(T, H), None, 0.0, weight, K, renormalise) is None]
    pool.compile_missing([spec_of(weight.dtype, H, E, K, renormalise, groups(T), norm=False) for T in tokens])
    return max(tokens, default=0)


def groups(T: int) -> int:
    """Groups of eight tokens of a cluster."""
    return 1 if T <= MOST_SINGLE else 2


def spec_of(
    dtype: torch.dtype, H: int, E: int, K: int, renormalise: bool, groups: int = 1, norm: bool = True
) -> spec.Spec:
    """The kernel of these sizes; groups: see `groups`."""
    fp16 = dtype == torch.float16
    sizes = {"SLICES": H // SLICE, "TILES": E // TILE, "TOP_K": K, "RENORMALISE": renormalise, "GROUPS": groups}
    return spec.Spec.of("sm90/norm_route", HOPPER.name, FP16=fp16, NORM=norm, **sizes)


def shared_memory(E: int, groups: int = 1) -> int:
    """Bytes of a block: a barrier, its tokens' logits; parts of a cluster's logits by 16 warps, squares."""
    tokens = TOKENS * groups
    return 8 + 4 * (groups * E + 16 * (E // CLUSTER * tokens + 8) + 16 * tokens)
