"""vLLM's attention backend with this package's kernels: keys and values stay in vLLM's blocks, of 64 tokens.

Decode tokens run decode_attention over vLLM's block table, and come first in a step. Prompts run prefill_attention on
Hopper, and vLLM's FlashAttention elsewhere, with the step's decode tokens. Keys and values are normalised, rotated and
written by one kernel.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, fields
from functools import cache
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
from ...cuda.arch import why_not_hopper
from ...cuda.attention import decode_sm90, decode_units, prefill, prefill_sm90
from ...cuda.attention.head_norm_rope import ROWS_ALONE
from ...cuda.attention.memory import TURNS, Memory, why_not_strides
from ...kv import torch_forms
from ...kv.attention import decode_attention, norm_rope_write, prefill_attention, units_of
from ...kv.cache import HeadNorms
from ...kv.paged import PAGE
from ...kv.step import Span
from .surface import SIDE_BY_SIDE, installed


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
    def supported_kv_cache_layouts(cls) -> Any:
        """The same since vLLM 0.33: heads before tokens, and a layer's blocks one after the other."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LBHNC,)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return PAGE


@dataclass
class Metadata(FlashAttentionMetadata):
    """vLLM's, and what the kernels read of a step.

    Attributes:
        decode: every sequence has one token.
        turns: see Memory.turns.
        units: of a decode step, or of `alone`: see Memory.units.
        rows, at: decode: row of the block table [R] int32, and position [R] int64, of each token. Else: block [T] int64
            that takes the token's key, and where in it [T] int64.
        count: [] int32 on the device, tokens that are no padding.
        alone: tokens of a step with prompts that are the next of their sequences; they come first.
        alone_rows, alone_at, alone_count: of these, as rows, at and count of a decode step.
        spans: the other sequences, with their rows of the block table. tiles: of these, as prefill_attention takes
            them; None: FlashAttention runs the step.
    """

    decode: bool = False
    turns: Tensor | None = None
    units: Tensor | None = None
    rows: Tensor | None = None
    at: Tensor | None = None
    count: Tensor | None = None
    alone: int = 0
    alone_rows: Tensor | None = None
    alone_at: Tensor | None = None
    alone_count: Tensor | None = None
    spans: list[Span] = field(default_factory=list)
    tiles: Tensor | None = None


def own_prompts(device: torch.device, dtype: torch.dtype, head_dim: int, block: int) -> bool:
    """Whether this package's kernel runs prompts: on Hopper it is faster than vLLM's FlashAttention."""
    known = dtype in (torch.bfloat16, torch.float16) and head_dim == prefill_sm90.HEAD_DIM
    return known and block in (8, 16, 32, PAGE) and why_not_hopper(device) is None


class Builder(FlashAttentionMetadataBuilder):
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    supports_update_block_table: ClassVar[bool] = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=False)
        self.own_prompts = own_prompts(device, kv_cache_spec.dtype, self.headdim, self.block_size)
        most, kv_heads = min(vllm_config.scheduler_config.max_num_seqs, decode_units.MOST), self.num_heads_kv
        self.turns = torch.empty(max(TURNS, most * kv_heads), dtype=torch.int32, device=device)
        # what the experts read: graphs of a model's parts hold no metadata
        layers = vllm_config.compilation_config.static_forward_context
        impl = getattr(layers.get(layer_names[0]), "impl", None)
        self.true_tokens: Tensor | None = getattr(impl, "true_tokens", None)
        # of any step: graphs keep its address
        self.units: Tensor | None = None
        if decode_units.serves(most, kv_heads, vllm_config.model_config.max_model_len, device):
            room = most + decode_units.extra(kv_heads, device)
            self.units = torch.empty(room, 4, dtype=torch.int32, device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        decode = common.max_query_len == 1 and common_prefix_len == 0
        own = self.own_prompts and common_prefix_len == 0 and common.seq_lens_cpu_upper_bound is not None
        # FlashAttention's own schedule, where it runs
        made = super().build(common_prefix_len, common, fast_build or decode or own)
        if decode:
            rows, at = common.query_start_loc[:-1], common.positions[: common.num_reqs]
        else:
            slots = common.slot_mapping[: common.num_actual_tokens]
            rows, at = slots // self.block_size, slots % self.block_size
        known = {field.name: getattr(made, field.name) for field in fields(FlashAttentionMetadata)}
        # zeroed at each step, since sleep mode forgets what is here
        turns = self.turns.zero_()
        step = Metadata(**known, decode=decode, turns=turns, rows=rows, at=at, count=common.query_start_loc[-1])
        if self.true_tokens is not None:
            self.true_tokens.copy_(common.query_start_loc[-1])
        if own and not decode:
            self._plan(step, common)
        at, count = (step.at, step.count) if decode else (step.alone_at, step.alone_count)
        if at is not None and self.units is not None:
            capacity = common.block_table_tensor.shape[1] * self.block_size
            step.units = units_of(at, count, capacity, self.num_heads_kv, self.units)
        return step

    def _plan(self, step: Metadata, common: Any) -> None:
        """Divide a step with prompts between the two kernels."""
        starts, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound.tolist()
        new = [end - first for first, end in zip(starts, starts[1:], strict=False)]
        alone = next((row for row, n in enumerate(new) if n > 1), len(new))
        step.spans = [Span(row, starts[row], n, lengths[row] - n) for row, n in enumerate(new) if row >= alone and n]
        tiles = prefill.tiles_of(((span.first, span.n, span.past, span.row) for span in step.spans), prefill_sm90.TILE)
        # one copy; kernels are compiled for a count that lies at a multiple of 16 bytes
        words = torch.tensor(
            [alone, 0, 0, 0, *tiles], dtype=torch.int32, device="cpu", pin_memory=self.device.type == "cuda"
        )
        words = words.to(self.device, non_blocking=True)
        step.alone, step.alone_count, step.tiles = alone, words[0], words[4:]
        step.alone_rows, step.alone_at = common.query_start_loc[:alone], common.positions[:alone]


class Impl(FlashAttentionImpl):
    """Attention of one layer.

    Attributes:
        q_norm, k_norm: vLLM's norms of query and key heads; the model sets them.
        true_tokens: [] int32 on the device, tokens of a step that are no padding: the model's, which the builder
            writes.
    """

    q_norm: Any
    k_norm: Any
    true_tokens: Tensor | None = None
    _blocks: tuple[weakref.ref[Tensor], Tensor, Tensor] | None = None

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
        memory = self.memory(kv_cache, step)
        q = self.write(query[:n], (key[:n], value[:n]), memory, step)
        if step.decode:
            decode_attention(q, memory, memory.capacity, output[:n])
        elif step.tiles is not None:
            self.attend(q, memory, step, step.tiles, output[:n])
        else:
            super().forward(layer, q, None, None, kv_cache, step, output)
        return output

    def attend(self, q: Tensor, memory: Memory, step: Metadata, tiles: Tensor, out: Tensor) -> None:
        """A step with prompts: its decode tokens, then the prompts."""
        if (n := step.alone) > 0:
            assert step.alone_rows is not None and step.alone_at is not None
            places = step.alone_rows, step.alone_at, step.alone_count
            alone = Memory(memory.keys, memory.values, *places, step.block_table, turns=step.turns, units=step.units)
            decode_attention(q[:n], alone, alone.capacity, out[:n])
        pages = Memory(memory.keys, memory.values, memory.rows, memory.positions, None, step.block_table)
        prefill_attention(q, pages, step.spans, tiles, out)

    def memory(self, kv_cache: Tensor, step: Metadata) -> Memory:
        """vLLM's blocks as pages; of a step with prompts as rows, which take a token at a place in a block."""
        keys, values = self.blocks(kv_cache)
        assert step.rows is not None and step.at is not None
        if step.decode:
            places = step.rows, step.at, step.count, step.block_table
            return Memory(keys, values, *places, turns=step.turns, units=step.units)
        return Memory(keys, values, step.rows, step.at)

    def blocks(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [blocks, kv_heads, block, head_dim].

        The same tensors at each call, since tensor maps are kept with them. They go when vLLM's tensor does: vLLM first
        measures graphs with another cache.
        """
        if self._blocks is None or self._blocks[0]() is not kv_cache:
            found = halves(kv_cache)
            reason = why_not_strides(*found)
            assert reason is None, f"vLLM's blocks have {reason}"
            # no views, which would keep the tensor itself
            keys, values = (
                part.new_empty(0).set_(part.untyped_storage(), part.storage_offset(), part.shape, part.stride())
                for part in found
            )
            self._blocks = weakref.ref(kv_cache, self._forget), keys, values
        return self._blocks[1:]

    def _forget(self, gone: object) -> None:
        self._blocks = None

    def write(self, qkv: Tensor, rope: tuple[Tensor, Tensor], memory: Memory, step: Metadata) -> Tensor:
        """Write keys and values; queries [T, heads, head_dim], normalised and rotated."""
        norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.variance_epsilon)
        q = norm_rope_write(qkv, norms, rope, memory)
        if q is None:
            q, k, v = decoder.head_norm_rope(qkv, self.num_kv_heads, norms, rope)
            torch_forms.keep(memory, k, v)
        return q


@cache
def side_by_side() -> bool:
    """Whether vLLM's blocks have a token's key and value side by side: [blocks, kv_heads, block, 2 head_dim]. Else
    [2, blocks, block, kv_heads, head_dim], of which heads lie before tokens."""
    return SIDE_BY_SIDE.why_not(installed) is None


def halves(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [blocks, kv_heads, block, head_dim] of a layer's cache."""
    keys, values = kv_cache.chunk(2, -1) if side_by_side() else kv_cache.transpose(2, 3).unbind(0)
    return keys, values


def no_blocks(like: Tensor, kv_heads: int, D: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one block, as vLLM's lie."""
    if side_by_side():
        return halves(like.new_zeros(1, kv_heads, PAGE, 2 * D))
    return halves(like.new_zeros(2, 1, kv_heads, PAGE, D).transpose(2, 3))


def compile_prompts(heads: int, kv_heads: int, norms: HeadNorms, longest: int) -> None:
    """Run what steps with prompts run, in each form that is compiled, so that no request waits for a compiler.

    vLLM runs no attention with prompts before it serves. Triton compiles once for T that 16 divides, once for other T.

    Args:
        heads, kv_heads: of a rank. norms: of a layer, on its device. longest: tokens of a sequence, at most.
    """
    like, rows = norms.q, heads + 2 * kv_heads
    if like.device.type != "cuda":
        return
    many = ROWS_ALONE // rows // 16 * 16 + 16
    D = like.shape[0]
    for T in (3, 16, many, many + 3):
        keys, values = no_blocks(like, kv_heads, D)
        cos, sin = (like.new_zeros(T, 1, D // 2) for _ in range(2))
        block, at = (torch.zeros(T, dtype=torch.int64, device=like.device) for _ in range(2))
        q = norm_rope_write(like.new_zeros(T, rows, D), norms, (cos, sin), Memory(keys, values, block, at))
        if q is None or not own_prompts(q.device, q.dtype, D, PAGE):
            continue
        tiles, pages = (torch.tensor(words, dtype=torch.int32, device=q.device) for words in ([0, 3, 0, 0], [[0]]))
        prefill_attention(q, Memory(keys, values, block, at, None, pages), [], tiles)
        # graphs of one and of two decode tokens hold kernels for a count that lies elsewhere
        pages = pages.new_zeros(2, -(-longest // PAGE))
        turns, capacity = pages.new_zeros(max(TURNS, T * kv_heads)), pages.shape[1] * PAGE
        for n in sorted({1, 2, T, *decode_sm90.cuts_begin(T, kv_heads, capacity, q.device, counted=True)}):
            units = units_of(at[:n], tiles[0], capacity, kv_heads)
            places = pages[0, :1].expand(n).contiguous(), at[:n], tiles[0], pages
            alone = Memory(keys, values, *places, turns=turns, units=units)
            decode_attention(q[:n], alone, alone.capacity)
