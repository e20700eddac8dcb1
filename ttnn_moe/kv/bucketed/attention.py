"""Attention to packed tiers: which family of kernels runs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...choice import Family, Operator
from ...cuda.attention import bucketed, bucketed_triton
from ...cuda.attention.tiers import Tier
from ...errors import ContractError
from . import reference
from .quantise import rotate as rotated


def _form(
    q: Tensor,
    tiers: Sequence[Tier],
    rows: Tensor,
    positions: Tensor | None,
    num_tokens: Tensor | None,
    out: Tensor | None,
    rotate: bool,
    mass: Sequence[Tensor] | None,
    q_scale: Tensor | None,
) -> Tensor:
    x = q if q_scale is None else q.float() * q_scale
    x = rotated(x.float()) if rotate else x
    if mass is not None:
        reference.add_mass(x, tiers, rows, positions, num_tokens, mass)
    found = reference.quantized_attention_bucketed(x, tiers, rows, positions)
    found = (rotated(found) if rotate else found).to(q.dtype)
    return found if out is None else out.copy_(found)


def _triton(
    q: Tensor,
    tiers: Sequence[Tier],
    rows: Tensor,
    positions: Tensor | None,
    num_tokens: Tensor | None,
    out: Tensor | None,
    rotate: bool,
    mass: Sequence[Tensor] | None,
    q_scale: Tensor | None,
) -> Tensor:
    x = q if q_scale is None else (q * q_scale).to(q.dtype)
    if not rotate:
        return bucketed_triton.launch(x, tiers, rows, positions, num_tokens, out)
    found = rotated(bucketed_triton.launch(rotated(x), tiers, rows, positions, num_tokens))
    return found if out is None else out.copy_(found)


ATTENTION: Operator[Tensor] = Operator(
    "bucketed_attention",
    [
        Family(
            bucketed.NAME,
            lambda device, q, tiers, rows, positions, num_tokens, out, rotate, mass, q_scale: bucketed.why_not(
                device, q, tiers, rows, positions
            ),
            bucketed.launch,
        ),
        Family(
            bucketed_triton.NAME,
            lambda device, q, tiers, rows, positions, num_tokens, out, rotate, mass, q_scale: (
                bucketed_triton.why_not(q, tiers) if mass is None else "it adds up no mass"
            ),
            _triton,
        ),
    ],
    _form,
)


def quantized_attention_bucketed(
    q: Tensor,
    tiers: Sequence[Tier],
    rows: Tensor,
    positions: Tensor | None = None,
    num_tokens: Tensor | None = None,
    out: Tensor | None = None,
    rotate: bool = False,
    mass: Sequence[Tensor] | None = None,
    q_scale: Tensor | None = None,
) -> Tensor:
    """Attention of q [T, n, heads, head_dim] to the tokens of all tiers, in one launch -> as q.

    No host reads a count, and a CUDA graph can hold it.

    Args:
        tiers: of one layer, each of other bits, with pages of one size.
        rows: [T] int64, row of the tables of each entry.
        positions: [T] int64, position of the first of the n queries. A query sees no later token. Tokens that are newer
            than the first query lie in tiers of 8 or 16 bits. None: every query sees all tokens of its row.
        num_tokens: [] int32 on the device: the output of later entries is undefined. None: all T.
        out: as q, to write the result to.
        rotate: whether keys and values in the tiers are rotated, as quantise.rotate does. q and the result are not: the
            CUDA C++ kernel rotates both itself.
        mass: fp32 [pages] for each tier, to which the attention that each page got is added: see reference.add_mass.
        q_scale: [head_dim] fp32, which q is multiplied by before it is rotated: the inverse of what keys were. None: 1.

    Raises:
        ContractError: a tensor of other sizes, of another dtype, on another device, or not contiguous where a kernel
            reads it as it lies. The values of rows are not read, so a row out of range is the caller's error.
    """
    _check(q, tiers, rows, positions, num_tokens, out, mass, q_scale)
    if q.numel() == 0:
        return torch.empty_like(q) if out is None else out
    return ATTENTION(q, tiers, rows, positions, num_tokens, out, rotate, mass, q_scale)


def _check(
    q: Tensor,
    tiers: Sequence[Tier],
    rows: Tensor,
    positions: Tensor | None,
    num_tokens: Tensor | None,
    out: Tensor | None,
    mass: Sequence[Tensor] | None,
    q_scale: Tensor | None,
) -> None:
    reference.check_query(q, tiers)
    if not q.is_floating_point():
        raise ContractError("q has the wrong dtype", got=q.dtype, expected="a float dtype", remedy="convert it")
    if mass is not None and len(mass) != len(tiers):
        raise ContractError("mass needs a tensor for each tier", got=len(mass), expected=len(tiers))
    T, D = len(q), q.shape[3]
    beside: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("rows", rows, (T,), torch.int64),
        ("positions", positions, (T,), torch.int64),
        ("num_tokens", num_tokens, (), torch.int32),
        ("out", out, tuple(q.shape), q.dtype),
        ("q_scale", q_scale, (D,), torch.float32),
    ]
    for tier, its in zip(tiers, mass or (), strict=False):
        beside.append((f"mass of {tier.bits} bits", its, (len(tier.payload),), torch.float32))
    for name, x, shape, dtype in beside:
        if x is None:
            continue
        if tuple(x.shape) != shape or x.dtype != dtype or x.device != q.device or not x.is_contiguous():
            how = "" if x.is_contiguous() else ", not contiguous"
            raise ContractError(
                f"{name} does not fit q",
                got=f"{list(x.shape)} of {x.dtype} on {x.device}{how}",
                expected=f"{list(shape)} of {dtype} on {q.device}, contiguous",
                remedy=f"give {name} so",
            )
