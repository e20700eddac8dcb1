"""The paged KV cache on an NPU: torch_npu's fused attention reads the pages. Never run on an NPU."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ascend import attention, operators
from ..errors import RequestError
from .cache import CacheSizes
from .pages import TabledRows, default_memory, zeros
from .step import DecodeStep, PrefillStep, Step


class NpuPagedCache(TabledRows):
    """Keys and values in pages of 128 tokens, in the model's dtype. Padding goes to page 0, which nobody reads.

    The attention operator takes lengths as host numbers, so each step carries them (DecodeStep.lengths). A captured
    decode step takes them anew at every replay: see `begin` and `replay_inputs`.

    Args:
        sizes: of the model. rows: sequences at a time.
        capacity: tokens of each, at most; rounded up to whole pages.
        pages: of all rows together.
        npu: torch_npu; default: it is imported. Tests put another in its place.

    Attributes:
        layers: of each layer, keys and values [1 + pages, 128, kv_heads * head_dim].

    Raises:
        RequestError: sizes below 1; sizes that the operator's page forbids.
    """

    default_page = attention.PAGE
    moves: ClassVar[bool] = True

    def __init__(self, sizes: CacheSizes, rows: int, capacity: int, pages: int, npu: Any = None):
        super().__init__(sizes, rows, capacity, pages, self.default_page)
        if reason := attention.why_not(sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.dtype, self.page, self._most):
            raise RequestError("no attention over pages for this model on an NPU", got=reason, remedy="see the page")
        self._npu = operators.load() if npu is None else npu
        shape = (sizes.layers, 2, 1 + self.total, self.page, sizes.kv_heads * sizes.head_dim)
        # zeros, since a masked value still adds 0 * value, which must not be NaN
        self.layers = [(keys, values) for keys, values in zeros(shape, sizes.dtype, sizes.device)]
        self._mask = attention.causal_mask(sizes.device)
        self._begun: list[int] = []
        # of the step under way: its layers share them
        self._step: Step | None = None
        self._slots = self._blocks = self._table

    @classmethod
    def within(
        cls,
        sizes: CacheSizes,
        rows: int,
        capacity: int,
        memory: int | None = None,
        page: int | None = None,
        npu: Any = None,
    ) -> NpuPagedCache:
        """A cache of as many pages as `memory` bytes hold, but no more than its rows can use.

        Args:
            memory: default: four fifths of what is free. page: 128 or None.

        Raises:
            RequestError: as the class; memory for less than one page; another page.
        """
        if page not in (None, cls.default_page):
            raise RequestError(
                "a page has the wrong size", got=f"page={page}", expected=cls.default_page, remedy="leave page out"
            )
        memory = default_memory(sizes.device) if memory is None else memory
        return cls(sizes, rows, capacity, cls.pages_within(sizes, rows, capacity, memory), npu)

    def prefill(
        self, chunks: Sequence[tuple[int, int]], logits_at: Sequence[int], decoding: Sequence[tuple[int, int]] = ()
    ) -> PrefillStep:
        """See RowCache."""
        step = super().prefill(chunks, logits_at, decoding)
        decoded = tuple(position + 1 for _, position in decoding)
        firsts = [span.first - len(decoding) for span in step.spans]
        asked = [(at - firsts[i], step.spans[i]) for at in logits_at for i in [bisect_right(firsts, at) - 1]]
        wanted = (*decoded, *(span.past + offset + 1 for offset, span in asked))
        own = None if step.decoding is None else replace(step.decoding, lengths=decoded)
        return replace(step, decoding=own, wanted_lengths=wanted)

    def decode(self, rows: Sequence[int], positions: Sequence[int]) -> DecodeStep:
        """See RowCache."""
        return replace(super().decode(rows, positions), lengths=tuple(position + 1 for position in positions))

    def write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        if layer == 0 or step is not self._step:
            self._enter(step)
        for pages, rows in zip(self.layers[layer], (k, v), strict=True):
            attention.write(self._npu, pages, self._slots, rows)

    def attend(self, layer: int, q: Tensor, step: Step) -> Tensor:
        if isinstance(step, DecodeStep):
            return self._decode(layer, q, step)
        spans, out = step.spans, torch.empty_like(q)
        if step.decoding is not None:
            n = len(step.decoding.rows)
            out[:n] = self._decode(layer, q[:n], step.decoding)
        for span in spans:
            table, mask = self._table[span.row : span.row + 1], None if span.n == 1 else self._mask
            asked = q[None, span.first : span.first + span.n]
            call = attention.arguments(asked, *self.layers[layer], table, [span.past + span.n], mask)
            out[span.first : span.first + span.n] = attention.attend(self._npu, call)[0]
        return out

    def why_not_captured(self) -> str | None:
        return None

    def why_not_captured_prompts(self) -> str | None:
        return "the attention operator takes the lengths of prompts from the host"

    def begin(self, decoding: Sequence[tuple[int, int]]) -> None:
        self._begun = [position + 1 for _, position in decoding]

    def replay_inputs(self, n: int) -> dict[str, list[int]]:
        """See RowCache: lengths of the n sequences of a captured step; padding has one key."""
        return {attention.LENGTHS: self._begun[:n] + [1] * (n - len(self._begun))}

    def _enter(self, step: Step) -> None:
        """What all layers of a step need: where each token goes, and the blocks of each decoding row."""
        # int32: a 910B divides int64 on its AI CPU (ops-math math/floor_div/op_api/floordiv.cpp)
        positions = step.positions.int()
        page = torch.div(positions, self.page, rounding_mode="floor")
        block = self.table[step.rows, page.long()]
        self._slots = (block * self.page + positions - page * self.page)[:, None]
        own = step if isinstance(step, DecodeStep) else step.decoding
        if own is not None:
            self._blocks = self._table[own.rows]
        self._step = step

    def _decode(self, layer: int, q: Tensor, step: DecodeStep) -> Tensor:
        lengths = self.replay_inputs(len(q))[attention.LENGTHS] if step.lengths is None else step.lengths
        call = attention.arguments(q[:, None], *self.layers[layer], self._blocks, lengths, None)
        return attention.attend(self._npu, call)[:, 0]
