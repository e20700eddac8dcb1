"""Writes into packed tiers, by kernels and by their definition: caches of equal bits before and after."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ttnn_moe.cuda.attention.bucketed_write import Change, Ring, Staged
from ttnn_moe.cuda.attention.tiers import UNIT, Layers
from ttnn_moe.kv.bucketed.storage import empty_layers

SINKS, RING, PAGE = 4, 92, 32


@dataclass
class Written:
    """Tiers of two rows in some layers, whose high tier holds `past` tokens of row 0; and tokens that a step staged."""

    tiers: dict[int, Layers]
    rings: list[Ring]
    staged: Staged
    high: int

    def tensors(self) -> list[Tensor]:
        """All that a write may change. 16 bits: payload as bf16."""
        whole = [layers.together for layers in self.tiers.values()]
        payloads = [t.payload.view(torch.bfloat16) if t.bits == 16 else t.payload for t in whole]
        return [*payloads, *(x for t in whole for x in (t.scales, t.token_ids))]


def written(high: int, bits: list[int], layers: int, kv_heads: int, n: int, device: str, seed: int = 0) -> Written:
    """Empty low tiers; a high tier of random tokens; n staged tokens, some of them odd."""
    random = torch.Generator().manual_seed(seed)
    own = (SINKS + RING) // PAGE
    tiers = {}
    for b in sorted({*bits, high}):
        pages = 1 + 2 * own + 16
        table = torch.zeros(3, own + 4, dtype=torch.int32)
        table[:2, :own] = 1 + torch.arange(2 * own).view(2, own)
        counts = torch.zeros(3, dtype=torch.int32)
        table, counts = table.to(device), counts.to(device)
        tiers[b] = empty_layers(b, layers, pages, kv_heads, 128, table, counts, PAGE)
        payload, scales = tiers[b].together.payload, tiers[b].together.scales
        if b == high:
            if b == 8:
                payload.copy_(torch.randint(256, payload.shape, generator=random, dtype=torch.uint8))
                scales.copy_(torch.rand(scales.shape, generator=random) * 0.03 + 1e-3)
            else:
                payload.view(torch.bfloat16).copy_(torch.randn(payload.view(torch.bfloat16).shape, generator=random))
                scales.fill_(1)
    k, v = torch.randn(2, layers, n, kv_heads, 128, generator=random).bfloat16()
    k *= torch.randn(128, generator=random).exp().bfloat16()
    if n > 3:
        k[:, 0], k[:, 1, :, 5], v[:, 1, :, 7], v[:, 2] = 0, float("inf"), float("nan"), 1e-7
    scale = torch.rand(layers, 1, 128, generator=random) + 0.5
    staged = Staged(k.to(device), v.to(device), scale.to(device))
    rings = [
        Ring(tier, by[0], SINKS, RING, i == 0)
        for i, (tier, by) in enumerate(zip(tiers[high].each, staged.key_scale, strict=True))
    ]
    return Written(tiers, rings, staged, high)


def changes(bits: list[int], n: int, device: str, seed: int = 0) -> list[Change]:
    """Row 0 moves two units of the high tier and of n staged tokens, by an order; row 1 one unit, in order."""
    own, random = (SINKS + RING) // PAGE, torch.Generator().manual_seed(seed)
    # row 0: 80 tokens in the high tier
    leaving = UNIT * ((80 + n - SINKS - RING + UNIT) // UNIT)
    at = [(bits[i % len(bits)], 1 + 2 * own + i // len(bits), 0) for i in range(leaving // UNIT)]
    order = torch.randperm(leaving, generator=random).to(device)
    stay = [p for p in range(80, 80 + n) if p >= SINKS + leaving]
    one = Change(1, SINKS, at, 80, -80, order, stay)
    two = Change(1 + own, SINKS + 3 * UNIT, [(bits[-1], 16 + 2 * own, 0)], 10**6, 0, None, [])
    return [one, two]
