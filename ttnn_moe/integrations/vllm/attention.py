"""vLLM's attention backend with this package's kernels: keys and values stay in vLLM's blocks, of 64 tokens.

A step of decode tokens alone runs decode_attention over vLLM's block table; all others run vLLM's FlashAttention. Keys
and values are normalised, rotated and written by one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from ... import decoder
from ...cuda.attention.head_norm_rope import ROWS_ALONE
from ...cuda.attention.memory import Memory
from ...kv import torch_forms
from ...kv.attention import decode_attention, norm_rope_write
from ...kv.cache import HeadNorms
from ...kv.paged import PAGE


class Backend(FlashAttentionBackend):
    """A layer calls its operator with qkv, cos and sin in place of q, k and v."""

    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        return Impl

    @staticmethod
    def get_builder_cls() -> Any:
        return Builder

    @classmethod
    def get_required_kv_cache_layout(cls) -> Any:
        return "HND"

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return PAGE


@dataclass
class Metadata(FlashAttentionMetadata):
    """vLLM's, and what the kernels read of a step.

    Attributes:
        decode: every sequence has one token.
        rows, at: decode: row of the block table [R] int32, and position [R] int64, of each token. Else: block [T] int64
            that takes the token's key, and where in it [T] int64.
        count: [] int32 on the device, tokens that are no padding.
    """

    decode: bool = False
    rows: Tensor | None = None
    at: Tensor | None = None
    count: Tensor | None = None


class Builder(FlashAttentionMetadataBuilder):
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    supports_update_block_table: ClassVar[bool] = False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        decode = common.max_query_len == 1 and common_prefix_len == 0
        # a decode step needs no schedule of FlashAttention
        made = super().build(common_prefix_len, common, fast_build or decode)
        if decode:
            rows, at = common.query_start_loc[:-1], common.positions[: common.num_reqs]
        else:
            slots = common.slot_mapping[: common.num_actual_tokens]
            rows, at = slots // self.block_size, slots % self.block_size
        own = {field.name: getattr(made, field.name) for field in fields(FlashAttentionMetadata)}
        return Metadata(**own, decode=decode, rows=rows, at=at, count=common.query_start_loc[-1])


class Impl(FlashAttentionImpl):
    """Attention of one layer.

    Attributes:
        q_norm, k_norm: vLLM's norms of query and key heads; the model sets them.
    """

    q_norm: Any
    k_norm: Any

    def forward(
        self,
        layer: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query: qkv [T, heads + 2 kv_heads, head_dim]. key, value: cos and sin [T, 1, head_dim / 2]."""
        step = attn_metadata
        if step is None:  # vLLM measures memory
            return output.fill_(0)
        assert key.is_contiguous() and value.is_contiguous(), f"cos has strides {key.stride()}, sin {value.stride()}"
        n = step.num_actual_tokens
        q = self.write(query[:n], (key[:n], value[:n]), self.memory(kv_cache, step), step)
        if step.decode:
            memory = self.memory(kv_cache, step)
            decode_attention(q, memory, memory.capacity, output[:n])
            return output
        return super().forward(layer, q, None, None, kv_cache, step, output)

    def memory(self, kv_cache: Tensor, step: Metadata) -> Memory:
        """vLLM's blocks as pages; of a step with prompts as rows, which take a token at a place in a block."""
        keys, values = kv_cache.transpose(2, 3).unbind(0)
        assert keys.is_contiguous(), f"blocks of keys are {keys.shape} with strides {keys.stride()}"
        assert step.rows is not None and step.at is not None
        if step.decode:
            return Memory(keys, values, step.rows, step.at, step.count, step.block_table)
        return Memory(keys, values, step.rows, step.at)

    def write(self, qkv: Tensor, rope: tuple[Tensor, Tensor], memory: Memory, step: Metadata) -> Tensor:
        """Write keys and values; queries [T, heads, head_dim], normalised and rotated."""
        norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.variance_epsilon)
        q = norm_rope_write(qkv, norms, rope, memory)
        if q is None:
            q, k, v = decoder.head_norm_rope(qkv, self.num_kv_heads, norms, rope)
            torch_forms.keep(memory, k, v)
        return q


def compile_writes(heads: int, kv_heads: int, norms: HeadNorms) -> None:
    """Run the write of steps with prompts in each form that Triton compiles, so that no request waits for a compiler.

    vLLM runs no attention with prompts before it serves. Triton compiles once for T that 16 divides, once for other T.

    Args:
        heads, kv_heads: of a rank. norms: of a layer, on its device.
    """
    like, rows = norms.q, heads + 2 * kv_heads
    if like.device.type != "cuda":
        return
    many = ROWS_ALONE // rows // 16 * 16 + 16
    D = like.shape[0]
    for T in (3, 16, many, many + 3):
        keys, values = (like.new_zeros(1, kv_heads, PAGE, D) for _ in range(2))
        cos, sin = (like.new_zeros(T, 1, D // 2) for _ in range(2))
        places = (torch.zeros(T, dtype=torch.int64, device=like.device) for _ in range(2))
        norm_rope_write(like.new_zeros(T, rows, D), norms, (cos, sin), Memory(keys, values, *places))
