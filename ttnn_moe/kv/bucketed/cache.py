"""The cache format of an engine: rows whose tokens lie in tiers of 2, 3, 4, 8 and 16 bits."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...choice import why_not_kernels
from ...cuda.attention import bucketed_prompt, bucketed_triton, bucketed_unpack
from ...cuda.attention.bucketed_prompt import Own
from ...cuda.attention.bucketed_unpack import Room
from ...cuda.attention.bucketed_write import Ring, Staged
from ...cuda.attention.memory import Memory, why_not_heads
from ...sizes import power_of_2
from ..attention import norm_rope_write as write_staged
from ..cache import CacheSizes, FusedWrite, HeadNorms
from ..pages import PagedRows, default_memory, zeros
from ..step import DecodeStep, PrefillStep, Span, Step, check_once
from ..transfer import to_device
from .allocation import DEFAULT_BITS, allocate
from .attention import ATTENTION
from .captured import SEQUENCES, CapturedPrompts
from .changes import Piece, change, empty_mass
from .memory import bytes_of, pages_in
from .moves import read_high
from .packing import check_head_dim
from .places import Places
from .prompts import observed, prompt_attention
from .quantise import rotate
from .storage import PAGE
from .writes import move, norm_rope_write, put


class BucketedCache(PagedRows, FusedWrite):
    """Keys and values in tiers under a budget of average bits.

    A page that `needed`, `total` and `free` count is room for `page` tokens of a row, in whatever tiers they end.

    Args:
        sizes: of the model; head_dim a multiple of 32.
        rows: sequences at a time. capacity: tokens of each, at most; rounded up to whole pages.
        pages: of all rows together. bits: average bits of a number in a full row. page: tokens of a page.

    Attributes:
        allocation: the tiers of a row.
        places: the tiers, and where the tokens of each row lie in them.

    Raises:
        RequestError: sizes below 1; what `allocate` refuses; the machine has less memory.
        ContractError: head_dim is no multiple of 32.
    """

    default_page = PAGE
    moves = True
    sequences = SEQUENCES

    def __init__(
        self,
        sizes: CacheSizes,
        rows: int,
        capacity: int,
        pages: int,
        bits: float = DEFAULT_BITS,
        page: int | None = None,
    ):
        page = PAGE if page is None else page
        self.allocation = allocate(bits, capacity, page)
        check_head_dim(sizes.head_dim)
        super().__init__(sizes, rows, capacity, pages, page)
        self.places = Places(sizes, self.allocation, self.rows, self.capacity, self.total, page)
        self._now: PrefillStep | None = None
        self._wanted: list[int] = []
        self._pieces: list[Piece] = []
        self._step_own: Own | None = None
        self._captured: CapturedPrompts | None = None
        self._k = self._v = torch.empty(sizes.layers, 0, sizes.kv_heads, sizes.head_dim, dtype=torch.bfloat16)
        self._each = self._zeros = torch.empty(0, dtype=torch.int64)
        self._row = torch.empty(0, dtype=torch.bfloat16)
        self._key_scale = torch.ones(sizes.layers, 1, sizes.head_dim, device=sizes.device)
        high, own = self.places.tiers[self.allocation.high], self.allocation
        self._rings = [
            Ring(tier, scale[0], own.sinks, own.ring, layer == 0)
            for layer, (tier, scale) in enumerate(zip(high.each, self._key_scale, strict=True))
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> BucketedCache:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce__(self) -> tuple[Callable[[type[BucketedCache], bytes], BucketedCache], tuple[Any, ...]]:
        # pickle alone parts the views of a tensor: what is written to one tier would not be read from it
        content = io.BytesIO()
        torch.save(self.__dict__, content)
        return _read_back, (type(self), content.getvalue())

    @classmethod
    def within(
        cls,
        sizes: CacheSizes,
        rows: int,
        capacity: int,
        memory: int | None = None,
        page: int | None = None,
        bits: float = DEFAULT_BITS,
    ) -> BucketedCache:
        """A cache of as many pages as `memory` bytes hold, but no more than its rows can use.

        Args:
            memory: default: 4 GiB, on a GPU four fifths of what is free. page: default: 64.

        Raises:
            RequestError: as the class; memory for less than one page.
        """
        allocation = allocate(bits, capacity, PAGE if page is None else page)
        check_head_dim(sizes.head_dim)
        memory = default_memory(sizes.device) if memory is None else memory
        return cls(sizes, rows, capacity, pages_in(allocation, sizes, rows, memory), bits, page)

    @property
    def bytes(self) -> int:
        """Bytes of all tiers: what `within` holds to its memory.

        On top come, in bf16, a step's staged tokens, one layer of the longest row whose prompt ran in long pieces, and
        what captured prompts keep: see CapturedPrompts.
        """
        return bytes_of(self.allocation, self.sizes, self.rows, self.total)

    def equalise(self, keys: Tensor, queries: Tensor) -> None:
        """Divide keys by sqrt(keys / queries) before they are quantised, and multiply queries by it.

        Channels that are large in every key then cost the others nothing. Call it before the first request.

        Args:
            keys, queries: [layers, D] fp32, how large each channel of them is.
        """
        least = 1e-3 * max(float(keys.max()), float(queries.max()), 1e-3)
        by = (keys.clamp_min(least) / queries.clamp_min(least)).sqrt()
        self._key_scale.copy_(by[:, None])

    # rows come and go

    def open(self, row: int, tokens: int) -> None:
        super().open(row, tokens)
        self.places.take(row, self.allocation.pages_of(self.room(row)))

    def close(self, row: int) -> None:
        super().close(row)
        self.places.give(row)
        self._pieces = [piece for piece in self._pieces if piece.span.row != row]

    # what a step does before its first layer

    def prefill(
        self, chunks: Sequence[tuple[int, int]], logits_at: Sequence[int], decoding: Sequence[tuple[int, int]] = ()
    ) -> PrefillStep:
        """See RowCache.

        Raises:
            RequestError: a row has no room for its tokens, or stands twice in the step; the machine has less memory. No
                row has grown then.
        """
        check_once([row for row, _ in (*decoding, *chunks)])
        self._settle(decoding)
        with self._growing(chunks):
            step = super().prefill(chunks, logits_at, decoding)
            self._now, self._wanted = step, list(logits_at)
            self._stage_room(len(step.rows))
            past = [span for span in step.spans if span.past]
            sizes = self.sizes
            why_not = why_not_kernels(sizes.device, sizes.dtype) or bucketed_prompt.why_not_heads(
                sizes.device, sizes.dtype, sizes.head_dim, self.page
            )
            self._step_own = None
            if past and why_not is None:
                own = [(span.first, span.n) for span in past]
                self._step_own = Own.of(own, sizes.kv_heads, self.page, sizes.device)
            self._pieces = [self._piece(span, past.index(span) if span.past else -1) for span in step.spans]
            self.places.refresh()
        return step

    @contextmanager
    def _growing(self, chunks: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Plan a step of these. Where that fails, there is none: the next step may hold the same tokens."""
        before = {row: self.lengths[row] for row, _ in chunks}
        try:
            yield
        except BaseException:
            self._pieces = []
            for row, length in before.items():
                self.lengths[row] = length
            raise

    def decode(self, rows: Sequence[int], positions: Sequence[int]) -> DecodeStep:
        """See RowCache.

        Raises:
            RequestError: as prefill.
        """
        check_once(rows)
        self.begin(list(zip(rows, positions, strict=True)))
        return super().decode(rows, positions)

    def begin(self, decoding: Sequence[tuple[int, int]]) -> None:
        self._settle(decoding)
        self._now = None
        self.places.refresh()

    def why_not_captured(self) -> str | None:
        sizes = self.sizes
        q = torch.empty(1, 1, sizes.heads, sizes.head_dim, dtype=sizes.dtype, device="meta")
        return why_not_kernels(sizes.device, sizes.dtype) or bucketed_triton.why_not(q, self.places.layers[0])

    def why_not_captured_prompts(self) -> str | None:
        sizes = self.sizes
        if sizes.dtype != torch.bfloat16:
            return "keys and values are not bf16"
        return self.why_not_captured() or why_not_heads(sizes.heads, sizes.kv_heads, sizes.head_dim)

    def reserve(self, tokens: int) -> None:
        if self._captured is None or self._captured.tokens < tokens:
            self._captured = CapturedPrompts(self.sizes, self.rows, self.capacity, tokens)

    def captures(self, chunks: Sequence[tuple[int, int]]) -> bool:
        """Those of prompts that begin."""
        return len(chunks) <= SEQUENCES and not any(self.lengths[row] for row, _ in chunks)

    def plan_words(self, tokens: int, sequences: int) -> int:
        return self._prompts.plan_words(tokens, sequences)

    def stage(
        self, chunks: Sequence[tuple[int, int]], decoding: Sequence[tuple[int, int]]
    ) -> tuple[list[Span], list[int]]:
        """See RowCache.

        Raises:
            RequestError: as prefill.
        """
        captured = self._prompts
        check_once([row for row, _ in (*decoding, *chunks)])
        self.begin(decoding)
        with self._growing(chunks):
            spans = self.spans(chunks, decoding)
            self._stage(*captured.kept)
            self._pieces = [
                Piece(span, self._each[: span.n], -1, empty_mass(self.places, span), None, None, number)
                for number, span in enumerate(captured.place(spans))
            ]
            return spans, captured.plan(spans)

    # what a layer does

    def write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        if isinstance(step, PrefillStep) and not step.spans:
            self._prompts.write(layer, k, v, step, self._rings[layer])
        elif isinstance(step, PrefillStep):
            T = len(k)
            self._k[layer, :T], self._v[layer, :T] = k, v
            if step.decoding is not None:
                n = len(step.decoding.rows)
                put(k[:n], v[:n], self._rings[layer], step.decoding)
        elif step.past_written:
            put(k, v, self._rings[layer], step)
        # else: tokens that this layer has written already, for PrefillStep.wanted

    def norm_rope_write(
        self, layer: int, qkv: Tensor, norms: HeadNorms, rope: tuple[Tensor, Tensor], step: Step
    ) -> Tensor | None:
        """See FusedWrite."""
        if isinstance(step, DecodeStep):
            return norm_rope_write(qkv, norms, rope, self._rings[layer], step) if step.past_written else None
        if not step.spans:
            return self._prompts.norm_rope_write(layer, qkv, norms, rope, step, self._rings[layer])
        T = len(qkv)
        k, v = self._k[layer, :T], self._v[layer, :T]
        # each staged token is a row of one position
        q = write_staged(qkv, norms, rope, Memory(k[:, :, None], v[:, :, None], self._each[:T], self._zeros[:T]))
        if q is not None and step.decoding is not None:
            n = len(step.decoding.rows)
            put(k[:n], v[:n], self._rings[layer], step.decoding)
        return q

    def attend(self, layer: int, q: Tensor, step: Step) -> Tensor:
        if isinstance(step, DecodeStep) and step.past_written:
            return self._decode(layer, q, step)
        now = self._now
        if now is None:
            return self._prompts.attend(layer, q, step, self._decode)
        done = n = 0 if now.decoding is None else len(now.decoding.rows)
        out = torch.empty_like(q)
        if now.decoding is not None:
            out[:n] = self._decode(layer, q[:n], now.decoding)
        whole = isinstance(step, PrefillStep)
        if self._step_own is not None and not (whole and all(p.room for p in self._pieces if p.which >= 0)):
            self._step_own.pack(self._k[layer], self._v[layer], self._key_scale[layer, 0])
        for piece in self._pieces:
            span = piece.span
            if whole:
                queries, at = span.n, piece.at
            else:
                asked = [n + i - span.first for i in self._wanted if span.first <= n + i < span.first + span.n]
                queries, at = len(asked), to_device(asked, q.device)
            if queries and queries == len(q):  # no other tokens
                return self._prompt(layer, q, at, piece).contiguous()
            if queries:
                out[done : done + queries] = self._prompt(layer, q[done : done + queries], at, piece)
            done += queries
        return out

    @property
    def _prompts(self) -> CapturedPrompts:
        assert self._captured is not None, "reserve comes before a captured step of prompts"
        return self._captured

    def _decode(self, layer: int, q: Tensor, step: DecodeStep) -> Tensor:
        tiers, scale = self.places.layers[layer], self._key_scale[layer, 0]
        # the operator itself: the cache makes what quantized_attention_bucketed would check
        return ATTENTION(q[:, None], tiers, step.rows, None, step.num_tokens, None, True, None, scale)[:, 0]

    def _prompt(self, layer: int, q: Tensor, at: Tensor, piece: Piece) -> Tensor:
        span = piece.span
        own = slice(span.first, span.first + span.n)
        k, v = self._k[layer, own], self._v[layer, own]
        if piece.mass is not None and len(q) == span.n:
            seen = observed(q, k, None if piece.high is None else piece.high[layer])
            piece.mass[-len(seen) :] += seen
        past, scale = self.places.layers[layer] if span.past else (), self._key_scale[layer, 0]
        room = piece.room if len(q) == span.n else None
        return prompt_attention(q, at, self._step_own, piece.which, k, v, past, span.row, scale, room)

    # tokens that leave the high tier, or a step's staged ones

    def _settle(self, decoding: Sequence[tuple[int, int]]) -> None:
        """Before a step: place the tokens of the last step's prompts, and make room for those of `decoding`."""
        self._check_decoding(decoding)
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            if piece.number is not None and piece.mass is not None:
                piece.mass[self.allocation.high_slots :] = self._prompts.mass(piece.number, piece.span)
        changes = [change(self.places, piece.span.row, piece.span.past + piece.span.n, piece) for piece in pieces]
        for row, position in decoding:
            if self.allocation.due(position, self.places.units[row]):
                changes.append(change(self.places, row, position, None))
        if changes:
            staged = Staged(self._k, self._v, self._key_scale) if pieces else None
            tiers = list(self.places.tiers.values())
            move(self.places.tiers[self.allocation.high], tiers, self._rings[0], changes, staged)

    def _piece(self, span: Span, which: int) -> Piece:
        mass, high = empty_mass(self.places, span), None
        if mass is not None and span.past:
            tier, layers = self.places.tiers[self.allocation.high], range(self.sizes.layers)
            high = rotate(read_high(tier, layers, self.places.own_pages(span.row))[0], in_order=False)
            high *= self._key_scale[:, None]
        return Piece(span, self._each[: span.n], which, mass, high, self._room_of(span))

    def _room_of(self, span: Span) -> Room | None:
        sizes, tokens = self.sizes, span.past + span.n
        if self._step_own is None or not span.past or span.n < bucketed_unpack.least_queries(sizes.device):
            return None
        if self._row.numel() < bucketed_unpack.numbers_of(sizes.kv_heads, tokens):
            most = bucketed_unpack.numbers_of(sizes.kv_heads, min(power_of_2(tokens), self.capacity))
            self._row = torch.empty(most, dtype=torch.bfloat16, device=sizes.device)
        return Room.of(self._row, sizes.kv_heads, span.past, span.n)

    @torch.inference_mode(False)  # what is kept also serves calls that record gradients
    def _stage_room(self, T: int) -> None:
        if self._k.shape[1] < T or self._k.device != self.sizes.device:
            sizes = self.sizes
            shape = (sizes.layers, power_of_2(T), sizes.kv_heads, sizes.head_dim)
            self._stage(*(zeros(shape, torch.bfloat16, sizes.device) for _ in range(2)))

    @torch.inference_mode(False)
    def _stage(self, k: Tensor, v: Tensor) -> None:
        """Where the tokens of steps with prompts are, [layers, room, kv_heads, D] each."""
        if self._k.data_ptr() != k.data_ptr():
            self._k, self._v = k, v
            self._each = torch.arange(k.shape[1], device=k.device)
            self._zeros = torch.zeros_like(self._each)


def _read_back(kind: type[BucketedCache], content: bytes) -> BucketedCache:
    made = kind.__new__(kind)
    made.__dict__.update(torch.load(io.BytesIO(content), weights_only=False))
    return made
