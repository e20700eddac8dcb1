"""Prompts that begin in a captured step: what the step keeps for the next one, which moves tokens to tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...cuda.attention import prefill
from ...cuda.attention.bucketed_write import Ring
from ...cuda.attention.memory import Memory
from ...sizes import ceil_div
from .. import torch_forms
from ..attention import decode_attention, prefill_attention
from ..attention import norm_rope_write as write_pages
from ..cache import CacheSizes, HeadNorms
from ..paged import PAGE
from ..pages import zeros
from ..step import DecodeStep, PrefillStep, Span, Step
from .prompts import QUERIES, observed_in_layers, observing
from .writes import norm_rope_write, put

SEQUENCES = 4
"""Prompts of a captured step, at most: their observing queries take memory."""

Decode = Callable[[int, Tensor, DecodeStep], Tensor]
"""Attention of a layer's queries to the tiers of their rows."""


class CapturedPrompts:
    """Keys and values of one layer in pages, which attention reads; those of all layers, token by token; and queries.

    A graph writes here, so this memory stays. Page 0 is the dummy page: tokens that decode meanwhile go there, too.

    Args:
        rows, capacity: of the cache. tokens: of a step, at most.

    Attributes:
        kept: [2, layers, room, kv_heads, D] bf16, keys and values of the last step: pages in order, so that each prompt
            begins with a page.
    """

    def __init__(self, sizes: CacheSizes, rows: int, capacity: int, tokens: int):
        self.sizes, self.tokens, self.spare = sizes, tokens, rows
        kv_heads, D, pages = sizes.kv_heads, sizes.head_dim, self._pages(tokens)
        self._pair = zeros((2, 1 + pages, kv_heads, PAGE, D), torch.bfloat16, sizes.device)
        self._keys, self._values = self._pair.unbind()
        self.kept = zeros((2, sizes.layers, pages * PAGE, kv_heads, D), torch.bfloat16, sizes.device)
        asked = sizes.layers, SEQUENCES * QUERIES, sizes.heads, D
        self._asked = zeros(asked, torch.bfloat16, sizes.device)
        self._host = zeros((rows + 1, ceil_div(capacity, PAGE)), torch.int32, torch.device("cpu"))
        self._table, self._filled = self._host.to(sizes.device), list[int]()
        self._each = torch.arange(pages * PAGE, device=sizes.device)
        self._step: PrefillStep | None = None

    # on the host, before a replay

    def place(self, spans: Sequence[Span]) -> list[Span]:
        """Give the prompts pages; the same spans, whose `first` is an index of `kept`."""
        table, first, placed = self._host.numpy(), 0, list[Span]()
        table[self._filled] = 0
        for span in spans:
            n = ceil_div(span.n, PAGE)
            table[span.row, :n] = range(1 + first, 1 + first + n)
            placed.append(replace(span, first=first * PAGE))
            first += n
        self._filled = [span.row for span in spans]
        if self._table is not self._host:
            self._table.copy_(self._host.pin_memory(), non_blocking=True)
        return placed

    def plan(self, spans: Sequence[Span]) -> list[int]:
        """Words of PrefillStep.plan: the observing queries of SEQUENCES prompts, then the tiles of attention."""
        at = [0] * (SEQUENCES * QUERIES)
        for number, span in enumerate(spans):
            asked = range(span.n)[observing(span.n)]
            at[number * QUERIES : number * QUERIES + len(asked)] = [span.first + i for i in asked]
        return [*at, *prefill.tiles_of(((span.first, span.n, 0, span.row) for span in spans), self._tile)]

    def plan_words(self, tokens: int, sequences: int) -> int:
        """See RowCache."""
        return SEQUENCES * QUERIES + 4 * (tokens // self._tile + sequences)

    def mass(self, number: int, span: Span) -> Tensor:
        """[n] fp32: what the observing queries of a prompt gave to its tokens, over all layers but the last.

        Args:
            number: of the prompt in its step. span: as `place` gave it.
        """
        asked = range(span.n)[observing(span.n)]
        queries = self._asked[:-1, number * QUERIES : number * QUERIES + len(asked)]
        return observed_in_layers(queries, self.kept[0, :-1, span.first : span.first + span.n])

    # in the graph

    def norm_rope_write(
        self, layer: int, qkv: Tensor, norms: HeadNorms, rope: tuple[Tensor, Tensor], step: PrefillStep, ring: Ring
    ) -> Tensor | None:
        """See FusedWrite."""
        own = step.decoding
        if own is not None:
            n = len(own.rows)
            if norm_rope_write(qkv[:n], norms, (rope[0][:n], rope[1][:n]), ring, own) is None:
                return None
        q = write_pages(qkv, norms, rope, self._memory(step.rows, step.positions, step.num_tokens))
        assert q is not None or own is None, "a kernel serves both writes, or none"
        if q is not None:
            self._keep(layer, len(qkv))
        return q

    def write(self, layer: int, k: Tensor, v: Tensor, step: PrefillStep, ring: Ring) -> None:
        """See KVCache."""
        rows = self._valid(step.rows, step.num_tokens)
        torch_forms.keep(self._memory(rows, step.positions, step.num_tokens), k, v)
        own = step.decoding
        if own is not None:
            n = len(own.rows)
            put(k[:n], v[:n], ring, replace(own, rows=self._valid(own.rows, own.num_tokens)))
        self._keep(layer, len(k))

    def attend(self, layer: int, q: Tensor, step: Step, decode: Decode) -> Tensor:
        """Attention of all tokens of a step, whose observing queries stay; or of those of PrefillStep.wanted."""
        if isinstance(step, DecodeStep):
            return self._attend_wanted(layer, q, step, decode)
        self._step, out, own, plan = step, torch.empty_like(q), step.decoding, step.plan
        assert plan is not None
        words = SEQUENCES * QUERIES
        self._asked[layer] = q.index_select(0, plan[:words])
        if own is not None:
            out[: len(own.rows)] = decode(layer, q[: len(own.rows)], own)
        # the prompts' outputs overwrite those of the decode step's padding
        return prefill_attention(q, self._memory(step.rows, step.positions), (), plan[words:], out)

    def _attend_wanted(self, layer: int, q: Tensor, step: DecodeStep, decode: Decode) -> Tensor:
        """First those that decode, then ends of prompts."""
        assert self._step is not None
        own, positions = self._step.decoding, step.positions
        if own is None:
            return decode_attention(q, self._memory(step.rows, positions, step.num_tokens), step.bound)
        assert own.num_tokens is not None
        n, decodes = len(own.rows), self._each[: len(q)] < own.num_tokens
        positions = torch.where(decodes, 0, positions)  # they have no pages here
        out = decode_attention(q, self._memory(step.rows, positions, step.num_tokens), step.bound)
        out[:n] = torch.where(decodes[:n, None, None], decode(layer, q[:n], own), out[:n])
        return out

    @property
    def _tile(self) -> int:
        return prefill.queries_of(self.sizes.head_dim, torch.bfloat16.itemsize)

    def _pages(self, tokens: int) -> int:
        """That any packing of so many tokens takes, at most."""
        return ceil_div(tokens, PAGE) + SEQUENCES

    def _memory(self, rows: Tensor, positions: Tensor, num_tokens: Tensor | None = None) -> Memory:
        return Memory(self._keys, self._values, rows, positions, num_tokens, self._table)

    def _valid(self, rows: Tensor, num_tokens: Tensor | None) -> Tensor:
        """Rows, with the dummy row for padding."""
        return rows if num_tokens is None else torch.where(self._each[: len(rows)] < num_tokens, rows, self.spare)

    def _keep(self, layer: int, T: int) -> None:
        """Copy a layer's pages of a step of T tokens."""
        n = self._pages(T)
        kept = self.kept[:, layer, : n * PAGE].unflatten(1, (n, PAGE))
        kept.copy_(self._pair[:, 1 : 1 + n].transpose(2, 3))
