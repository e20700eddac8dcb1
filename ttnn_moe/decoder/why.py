"""Which kernels run a decoder layer of given sizes, and why no others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..choice import Operator
from ..cuda.attention.bucketed_write import Ring
from ..cuda.attention.memory import Memory
from ..cuda.attention.tiers import UNIT, Tier
from ..kv import attention
from ..kv.bucketed.attention import ATTENTION as BUCKETED
from ..kv.bucketed.writes import WRITE
from ..kv.cache import HeadNorms
from ..kv.paged import PAGE
from ..kv.step import DecodeStep
from . import operators


@dataclass(frozen=True)
class Why:
    """One operator.

    Attributes:
        operator: its name.
        runs: the family that runs it, or "torch".
        refused: (family, reason) of each that was asked before.
    """

    operator: str
    runs: str
    refused: tuple[tuple[str, str], ...]


def why(
    T: int, H: int, heads: int, kv_heads: int, head_dim: int, E: int, K: int, dtype: torch.dtype, device: torch.device
) -> list[Why]:
    """What runs each operator of a layer for T tokens, in the layer's order. Allocates and launches nothing.

    Args:
        H: hidden size. heads, kv_heads, head_dim: of attention. E, K: experts, and those of a token.
        device: with an index, or the current GPU.
    """

    def of(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def row(operator: Operator[Any], part: str, *args: Any) -> Why:
        runs, refused = operator.explain(device, *args)
        return Why(f"{operator.name} ({part})" if part else operator.name, runs, refused)

    x, norm, eps, q = of(T, H), of(H), 1e-6, of(T, heads, head_dim)
    qkv = of(T, heads + 2 * kv_heads, head_dim)
    head_norm, angles, words = of(head_dim), of(T, 1, head_dim // 2), of(T, dtype=torch.int64)
    keys, tiles = of(2, kv_heads, PAGE, head_dim), of(4, dtype=torch.int32)
    memory = Memory(keys, keys, words, words, None, of(1, 1, dtype=torch.int32))
    attended = q.flatten(1)
    payload, scales = (
        of(1, kv_heads, 2, PAGE * head_dim // 2, dtype=torch.uint8),
        of(1, kv_heads, PAGE // UNIT, 8, 4, 2),
    )
    ids, table, counts = (of(*shape, dtype=torch.int32) for shape in ((1, PAGE), (1, 1), (1,)))
    packed = [Tier(4, payload, scales, ids, table, counts)]
    norms, step = HeadNorms(head_norm, head_norm, eps), DecodeStep(words, words, PAGE)
    return [
        row(operators.NORM_LINEAR, "query, key, value", x, norm, eps, of(qkv[0].numel(), H), None),
        row(attention.NORM_ROPE_WRITE, "", qkv, norms, (angles, angles), memory),
        row(attention.DECODE, "", q, memory, PAGE, None),
        row(attention.PREFILL, "", q, memory, (), tiles, None),
        row(WRITE, "", qkv, norms, (angles, angles), Ring(packed[0], head_norm, 16, 112, False), step),
        row(BUCKETED, "", q[:, None], packed, words, None, None, None, False, None, None),
        row(operators.LINEAR_ADD, "output", attended, of(H, heads * head_dim), None, x),
        row(operators.NORM_ROUTE, "", x, norm, eps, of(E, H), K, True),
        row(operators.ROUTE, "", of(T, E), K, True),
        row(operators.RMS_NORM, "", x, norm, eps),
    ]
