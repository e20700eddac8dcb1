"""A KV cache in pages: a row takes as many as it needs and gives them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..arguments import as_integer
from ..choice import why_not_kernels
from ..cuda.attention import prefill
from ..cuda.attention.memory import TURNS, Memory, why_not_heads
from ..errors import RequestError
from ..sizes import power_of_2
from ..visible import shown
from . import torch_forms
from .attention import decode_attention, norm_rope_write, prefill_attention, units_of
from .cache import CacheSizes, FusedWrite, HeadNorms
from .pages import TabledRows, default_memory, zeros
from .step import DecodeStep, Span, Step

PAGE = 64
"""Tokens of a page: what the attention kernels take at a time."""


class PagedCache(TabledRows, FusedWrite):
    """Keys and values in pages, in the model's dtype. The dummy row's tokens go to page 0, which nobody reads.

    Args:
        sizes: of the model.
        rows: sequences at a time.
        capacity: tokens of each, at most; rounded up to whole pages.
        pages: of all rows together.
        page: tokens of a page: a power of two, at least 16.

    Attributes:
        k, v: [layers, 1 + pages, kv_heads, page, head_dim].
        layers: the same, layer by layer. Tensor maps are kept with these tensors, so they are made once.

    Raises:
        RequestError: sizes below 1, or a page of another size.
    """

    default_page = PAGE

    def __init__(self, sizes: CacheSizes, rows: int, capacity: int, pages: int, page: int = PAGE):
        super().__init__(sizes, rows, capacity, pages, check_page(page))
        shape = (sizes.layers, 1 + self.total, sizes.kv_heads, page, sizes.head_dim)
        # zeros, since a masked value still adds 0 * value, which must not be NaN
        self.k, self.v = (zeros(shape, sizes.dtype, sizes.device) for _ in range(2))
        self.layers = list(zip(self.k, self.v, strict=True))
        # steps have up to a power of two of tokens
        self._turns = zeros((max(TURNS, power_of_2(rows) * sizes.kv_heads),), torch.int32, sizes.device)

    @classmethod
    def within(
        cls, sizes: CacheSizes, rows: int, capacity: int, memory: int | None = None, page: int | None = None
    ) -> PagedCache:
        """A cache of as many pages as `memory` bytes hold, but no more than its rows can use.

        Args:
            memory: default: 4 GiB, on a GPU four fifths of what is free. page: default: PAGE.

        Raises:
            RequestError: as the class; memory for less than one page.
        """
        page = check_page(PAGE if page is None else page)
        memory = default_memory(sizes.device) if memory is None else memory
        return cls(sizes, rows, capacity, cls.pages_within(sizes, rows, capacity, memory, page), page)

    def write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        torch_forms.keep(self._memory(layer, step), k, v)

    def norm_rope_write(
        self, layer: int, qkv: Tensor, norms: HeadNorms, rope: tuple[Tensor, Tensor], step: Step
    ) -> Tensor | None:
        """See FusedWrite."""
        return norm_rope_write(qkv, norms, rope, self._memory(layer, step))

    def attend(self, layer: int, q: Tensor, step: Step) -> Tensor:
        if isinstance(step, DecodeStep):
            return decode_attention(q, self._memory(layer, step), step.bound)
        out, own = None, step.decoding
        if own is not None:
            out, n = torch.empty_like(q), len(own.rows)
            decode_attention(q[:n], self._memory(layer, own), own.bound, out[:n])
        # the prompts' outputs overwrite those of the decode step's padding
        return prefill_attention(q, self._memory(layer, step), step.spans, step.plan, out)

    def divided(self, step: DecodeStep) -> DecodeStep:
        units = units_of(step.positions, step.num_tokens, self.capacity, self.sizes.kv_heads)
        return step if units is None else replace(step, units=units)

    def why_not_captured(self) -> str | None:
        sizes = self.sizes
        return why_not_kernels(sizes.device, sizes.dtype) or why_not_heads(sizes.heads, sizes.kv_heads, sizes.head_dim)

    def plan(self, spans: Sequence[Span]) -> list[int]:
        if self.why_not_captured() is not None:
            return []
        return prefill.tiles_of(((span.first, span.n, span.past, span.row) for span in spans), self._queries)

    def plan_words(self, tokens: int, sequences: int) -> int:
        return 0 if self.why_not_captured() is not None else 4 * (tokens // self._queries + sequences)

    def _memory(self, layer: int, step: Step) -> Memory:
        written, units = (step.past_written, step.units) if isinstance(step, DecodeStep) else (False, None)
        (keys, values), rows, positions = self.layers[layer], step.rows, step.positions
        return Memory(keys, values, rows, positions, step.num_tokens, self.table, written, self._turns, units)

    @property
    def _queries(self) -> int:
        return prefill.queries_of(self.sizes.head_dim, self.sizes.dtype.itemsize)


def check_page(page: int) -> int:
    """A page's tokens.

    Raises:
        RequestError: no power of two, or below 16.
    """
    found = as_integer(page)
    if found is None or found < 16 or found & (found - 1):
        raise RequestError(
            "a page has the wrong size",
            got=f"page={shown(page)}",
            expected="a power of two, at least 16",
            remedy="leave page out",
        )
    return found
