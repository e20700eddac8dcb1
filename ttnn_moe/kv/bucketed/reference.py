"""Attention to packed tiers in plain torch: the definition of what the kernels do.

Each tier gives a partial result (output, maximum, sum). `merge` joins them by their log-sum-exp, as streaming softmax
does (https://arxiv.org/abs/1805.02867, https://arxiv.org/abs/2205.14135). The host reads counts on a CPU only, where
the cost follows the tokens held: rows of similar lengths attend together, and pages without tokens are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...cuda.attention.tiers import UNIT, Tier
from ...errors import ContractError
from ...sizes import ceil_div
from ..torch_forms import alike
from .packing import check_bits, check_head_dim
from .storage import read_units


@dataclass(frozen=True)
class Partial:
    """Attention to some of a row's keys, before the division by the sum.

    Attributes:
        out: [T, n, heads, D] fp32, the sum of exp(score - most) * value.
        most: [T, n, heads] fp32, the highest score, times 1 / sqrt(D); -inf: no key.
        total: [T, n, heads] fp32, the sum of exp(score - most).
    """

    out: Tensor
    most: Tensor
    total: Tensor


def attend_bucket(bits: int, q: Tensor, tier: Tier, rows: Tensor, positions: Tensor | None = None) -> Partial:
    """Attention of q [T, n, heads, D] to the tokens of one tier.

    Args:
        bits: of the tier.
        rows: [T] int64, cache row of each entry.
        positions: [T] int64, position of the first of the n queries. A query sees tokens up to its own position. None:
            it sees all tokens of its row.

    Raises:
        ContractError: other bits than the tier's; q does not fit the tier.
    """
    return _attend(bits, q, tier, rows, positions)[0]


def _attend(bits: int, q: Tensor, tier: Tier, rows: Tensor, positions: Tensor | None) -> tuple[Partial, Tensor]:
    """attend_bucket, and exp(score - most) of each slot: [T, n, heads, slots]."""
    check_query(q, [tier])
    if check_bits(bits) != tier.bits:
        raise ContractError("the tier has other bits", got=bits, expected=tier.bits, remedy="pass the tier's own bits")
    n, heads, D = q.shape[1:]
    units_of_page = tier.page // UNIT
    pages = _pages(tier, rows)
    T, many = pages.shape
    units = (pages[..., None] * units_of_page + torch.arange(units_of_page, device=q.device)).flatten()
    k, v, held = read_units(tier, units)
    k, v = (x.reshape(T, many * tier.page, tier.kv_heads, D) for x in (k, v))
    slots = torch.arange(many * tier.page, device=q.device)
    seen = (slots < tier.counts[rows][:, None]) & held.reshape(T, -1)  # [T, slots]
    seen = seen[:, None].expand(T, n, -1)
    if positions is not None:
        ids = tier.token_ids[pages].reshape(T, 1, -1)
        seen = seen & (ids <= (positions[:, None] + torch.arange(n, device=q.device))[..., None])
    grouped = q.float().unflatten(2, (tier.kv_heads, heads // tier.kv_heads))
    scores = torch.einsum("tnkgd,tskd->tnkgs", grouped, k) / D**0.5
    mask = ~seen[:, :, None, None]
    scores = scores.masked_fill(mask, float("-inf"))
    # amax passes NaN on
    most = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], float("-inf"))
    base = torch.where(most == float("-inf"), 0.0, most)
    p = torch.exp(scores - base[..., None])
    # a token that nobody sees adds nothing, whatever it holds
    any_sees = seen.any(1)[:, :, None, None]
    out = torch.einsum("tnkgs,tskd->tnkgd", p, torch.where(any_sees, v, 0.0))
    return Partial(out.flatten(2, 3), most.flatten(2, 3), p.sum(-1).flatten(2, 3)), p.flatten(2, 3)


def merge(partials: Sequence[Partial]) -> Tensor:
    """The output [T, n, heads, D] fp32 of all partial results; 0 where no tier has a key."""
    most = torch.stack([partial.most for partial in partials]).amax(0)
    base = torch.where(most == float("-inf"), 0.0, most)
    total = torch.zeros_like(most)
    out = torch.zeros_like(partials[0].out)
    for partial in partials:
        weight = torch.exp(partial.most - base)
        total = total + partial.total * weight
        out = out + partial.out * weight[..., None]
    return out / torch.where(total == 0, 1.0, total)[..., None]


def quantized_attention_bucketed(
    q: Tensor, tiers: Sequence[Tier], rows: Tensor, positions: Tensor | None = None
) -> Tensor:
    """Attention of q [T, n, heads, D] to the tokens of all tiers -> as q. Arguments as attend_bucket.

    Raises:
        ContractError: no tiers, two of the same bits, or q does not fit them.
    """
    check_query(q, tiers)
    if not _host_counts(q):
        return _together(q, tiers, rows, positions)
    out = torch.empty_like(q)
    for places, _ in alike(torch.stack([tier.counts[rows] for tier in tiers]).sum(0).tolist()):
        if len(places) == len(q):
            return _together(q, tiers, rows, positions)
        at = torch.tensor(places, device=q.device)
        out[at] = _together(q[at], tiers, rows[at], None if positions is None else positions[at])
    return out


def _together(q: Tensor, tiers: Sequence[Tier], rows: Tensor, positions: Tensor | None) -> Tensor:
    return merge([attend_bucket(tier.bits, q, tier, rows, positions) for tier in tiers]).to(q.dtype)


def _host_counts(x: Tensor) -> bool:
    """Whether the host may read counts."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _pages(tier: Tier, rows: Tensor) -> Tensor:
    """[T, n] int64, the pages of rows [T]; on a CPU only as many as the longest of them uses."""
    table = tier.table
    if _host_counts(rows) and len(rows):
        table = table[:, : ceil_div(int(tier.counts[rows].max()), tier.page)]
    return table[rows].to(torch.int64)


def add_mass(
    q: Tensor,
    tiers: Sequence[Tier],
    rows: Tensor,
    positions: Tensor | None,
    num_tokens: Tensor | None,
    mass: Sequence[Tensor],
) -> None:
    """Add the attention that each page gets, summed over queries and heads, to mass: fp32 [pages] for each tier.

    A row's parts add up to n * heads. num_tokens: [] int32, entries from it on add nothing. None: all T count.
    """
    found = [_attend(tier.bits, q, tier, rows, positions) for tier in tiers]
    most = torch.stack([partial.most for partial, _ in found]).amax(0)
    base = torch.where(most == float("-inf"), 0.0, most)
    total = sum((partial.total * torch.exp(partial.most - base) for partial, _ in found), torch.zeros_like(base))
    counts = torch.ones(len(q), device=q.device)
    if num_tokens is not None:
        counts = (torch.arange(len(q), device=q.device) < num_tokens).float()
    for tier, (partial, p), into in zip(tiers, found, mass, strict=True):
        weight = torch.exp(partial.most - base) / torch.where(total == 0, 1.0, total)
        shares = (p * weight[..., None]).sum((1, 2)).unflatten(-1, (-1, tier.page)).sum(-1) * counts[:, None]
        into.index_add_(0, _pages(tier, rows).flatten(), shares.flatten())


def check_query(q: Tensor, tiers: Sequence[Tier]) -> None:
    """Check q [T, n, heads, D] against tiers.

    Raises:
        ContractError: no tiers, two of the same bits, other sizes, or a tier that is not like the others.
    """
    if not tiers or len({tier.bits for tier in tiers}) != len(tiers):
        raise ContractError(
            "attention needs tiers of different bits",
            got=f"bits {[tier.bits for tier in tiers]}",
            expected="at least one tier, each of other bits",
            remedy="pass the tiers of one layer",
        )
    if q.dim() != 4:
        raise ContractError("q has the wrong shape", got=list(q.shape), expected="[T, n, heads, head_dim]")
    D = check_head_dim(q.shape[3])
    for tier in tiers:
        check_bits(tier.bits)
        if tier.head_dim != D or q.shape[2] % tier.kv_heads:
            raise ContractError(
                f"the tier of {tier.bits} bits does not fit the queries",
                got=f"head_dim {tier.head_dim}, {tier.kv_heads} key/value heads",
                expected=f"head_dim {D}, and a number of heads that divides {q.shape[2]}",
                remedy="pass tiers and queries of one layer",
            )
    for what, sizes in (
        ("key/value heads", [tier.kv_heads for tier in tiers]),
        ("rows", [len(tier.table) for tier in tiers]),
    ):
        if len(set(sizes)) > 1:
            raise ContractError(
                f"the tiers of {[tier.bits for tier in tiers]} bits are not of one layer",
                got=f"{sizes} {what}",
                expected=f"as many {what} in each",
                remedy="pass the tiers of one layer",
            )
    for tier in tiers:
        _check_tensors(tier, D, q.device)


def _check_tensors(tier: Tier, D: int, device: torch.device) -> None:
    pages, heads, P, rows, wide = len(tier.payload), tier.kv_heads, tier.page, *tier.table.shape
    for name, shape, dtype in (
        ("payload", (pages, heads, 2, P * D * tier.bits // 8), torch.uint8),
        ("scales", (pages, heads, P // UNIT, 8, 4, 2), torch.float16),
        ("token_ids", (pages, P), torch.int32),
        ("table", (rows, wide), torch.int32),
        ("counts", (rows,), torch.int32),
    ):
        x: Tensor = getattr(tier, name)
        how = "" if _is_read_right(name, x) else f", strides {list(x.stride())}"
        if tuple(x.shape) != shape or x.dtype != dtype or x.device != device or how:
            raise ContractError(
                f"{name} of the tier of {tier.bits} bits does not fit",
                got=f"{list(x.shape)} of {x.dtype} on {x.device}{how}",
                expected=f"{list(shape)} of {dtype} on {device}, row-major",
                remedy="pass the tiers of one layer, on the device of the queries",
            )


def _is_read_right(name: str, x: Tensor) -> bool:
    """Whether kernels, which read memory as it lies, find the elements; lines of a table may have room between them."""
    if name != "table" or x.numel() == 0:
        return x.is_contiguous()
    return x[0].is_contiguous() and (len(x) == 1 or x.stride(0) >= x.shape[1])
