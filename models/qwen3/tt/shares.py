"""Attention's weights cut for the chips of a mesh: each part [D, ...] goes to its chip.

A chip holds the projections of its own heads. The output projections of all chips add up to the model's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ttnn_moe.tenstorrent.all_reduce import summed_columns
from ttnn_moe.tenstorrent.heads import HeadShare

from ..config import Qwen3MoeConfig


class AttentionCut:
    """Cuts of one layer's projections. config: of the model. share: the heads of each chip."""

    def __init__(self, config: Qwen3MoeConfig, share: HeadShare):
        self.config, self.share = config, share
        self.columns = summed_columns(config.hidden_size, share.D)

    def qkv(self, rows: Tensor) -> Tensor:
        """Rows of q, k, then v heads, [(heads + 2 kv_heads) * head_dim, ...] -> [D, rows of a chip, ...]."""
        kv_heads = self.config.num_key_value_heads
        heads = self.config.num_attention_heads, kv_heads, kv_heads
        q, k, v = rows.unflatten(0, (-1, self.config.head_dim)).split(heads)
        own = [(self.share.queries(chip), self.share.keys(chip)) for chip in range(self.share.D)]
        return torch.stack([torch.cat((q[mine], k[keys], v[keys])).flatten(0, 1) for mine, keys in own])

    def out(self, weight: Tensor) -> Tensor:
        """weight [H, heads * head_dim] -> [D, columns, head_dim of a chip's heads]; 0 for a copy."""
        heads = weight.unflatten(1, (-1, self.config.head_dim))
        parts = [heads[:, self.share.queries(chip)].flatten(1) * self.share.adds(chip) for chip in range(self.share.D)]
        return self._widened(torch.stack(parts))

    def out_bias(self, bias: Tensor) -> Tensor:
        """bias [H] -> [D, columns], on the first chip alone."""
        return self._widened(torch.cat((bias[None], bias.new_zeros(self.share.D - 1, len(bias)))))

    def _widened(self, parts: Tensor) -> Tensor:
        """parts [D, H, ...] with as many outputs as the chips scatter; 0 past H."""
        return torch.cat((parts, parts.new_zeros(len(parts), self.columns - parts.shape[1], *parts.shape[2:])), 1)
