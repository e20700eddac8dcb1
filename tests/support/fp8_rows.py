"""A KV-cache format that the package does not have: dense rows of fp8 bytes, with a scale for each token and head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ttnn_moe.kv.cache import CacheSizes, RowCache
from ttnn_moe.kv.step import DecodeStep, Step

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes (uint8) as x [..., head_dim], and a scale fp32 [...]."""
    scale = x.float().abs().amax(-1).clamp_min(1e-12) / LARGEST
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8), scale


def from_fp8(held: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    bytes_, scale = held
    return (bytes_.view(torch.float8_e4m3fn).float() * scale[..., None]).to(dtype)


class Fp8Rows(RowCache):
    """Rows of `capacity` tokens, all allocated: a page is a whole row.

    Attributes:
        bytes: [layers, 2, rows + 1, capacity, kv_heads, head_dim] uint8, keys then values.
        scales: the same without head_dim, fp32.
    """

    def __init__(self, sizes: CacheSizes, rows: int, capacity: int):
        self.sizes, self.rows, self.capacity, self.spare = sizes, rows, capacity, rows
        self.lengths = [0] * (rows + 1)
        self._used: set[int] = set()
        shape = (sizes.layers, 2, rows + 1, capacity, sizes.kv_heads)
        self.bytes = torch.zeros(*shape, sizes.head_dim, dtype=torch.uint8)
        self.scales = torch.zeros(shape)

    @property
    def total(self) -> int:
        return self.rows

    @property
    def free(self) -> int:
        return self.rows - len(self._used)

    def needed(self, tokens: int) -> int:
        return 1

    def open(self, row: int, tokens: int) -> None:
        assert row not in self._used and tokens <= self.capacity
        self._used.add(row)
        self.lengths[row] = 0

    def close(self, row: int) -> None:
        self._used.remove(row)

    def write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        for kind, x in enumerate((k, v)):
            held = self.bytes[layer, kind], self.scales[layer, kind]
            for into, values in zip(held, to_fp8(x), strict=True):
                into[step.rows, step.positions] = values

    def attend(self, layer: int, q: Tensor, step: Step) -> Tensor:
        if isinstance(step, DecodeStep):
            return torch.cat(
                [
                    self._attend(layer, q[t : t + 1], row, at)
                    for t, (row, at) in enumerate(zip(step.rows.tolist(), step.positions.tolist(), strict=True))
                ]
            )
        out = [] if step.decoding is None else [self.attend(layer, q[: len(step.decoding.rows)], step.decoding)]
        out += [self._attend(layer, q[s.first : s.first + s.n], s.row, s.past) for s in step.spans]
        return torch.cat(out)

    def _attend(self, layer: int, q: Tensor, row: int, past: int) -> Tensor:
        """Tokens q [n, heads, head_dim] of one row, at positions past, past + 1, ..."""
        n = past + len(q)
        k, v = (
            from_fp8((self.bytes[layer, kind, row, :n], self.scales[layer, kind, row, :n]), q.dtype).transpose(0, 1)
            for kind in range(2)
        )
        mask = torch.ones(len(q), n, dtype=torch.bool).tril(past)
        out = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask, enable_gqa=len(k) != q.shape[1])
        return out.transpose(0, 1)
