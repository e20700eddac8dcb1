"""Requests that run together: pages and rows for those that fit, a chunk of prompts and a decode step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ttnn_moe.kv.paged import PagedCache

from .decode import Drawn, FixedSteps, Landing, Pending, draw
from .model import Qwen3Moe
from .prefill import FixedPrefill, Progress, capture_all, prefill
from .requests import Request
from .sampling import Sampling

SEQUENCES = 64
"""Prompts that one step may begin or go on with."""


@dataclass(frozen=True)
class Launched:
    """A new token for each of these requests is being made."""

    requests: list[Request]
    pending: Pending


class Batch:
    """The requests of an engine, from its queue to their last token.

    Args:
        model: see Engine. cache: where their keys and values go.
        chunk: prompt tokens of a step, at most.
        graphs: steps are CUDA graphs, launched before the tokens of the last are read.

    Attributes:
        waiting: without pages, in the order in which they came. filling: whose prompt is not in the cache yet.
        decoding: in the order of the decode step's rows; some may be over.
    """

    def __init__(self, model: Qwen3Moe, cache: PagedCache, chunk: int, graphs: bool):
        self.model, self.cache, self.chunk, self.graphs, self.ahead = model, cache, chunk, graphs, graphs
        self.steps = FixedSteps(model, cache, graphs)
        self.fixed: FixedPrefill | None = None
        self.waiting: deque[Request] = deque()
        self.filling: list[Request] = []
        self.decoding: list[Request] = []
        self.free_rows = list(reversed(range(cache.rows)))
        self.launched: deque[Launched] = deque()
        self._fills = deque(Landing(cache.rows, model.device) for _ in range(3))

    def capture(self, progress: Progress | None = None) -> None:
        """See Engine.capture; with graphs only."""
        if self.fixed is None:
            sequences, decoding = min(self.cache.rows, SEQUENCES), self.steps.size
            self.fixed = FixedPrefill(
                self.model, self.cache, self.steps.pool, sequences, decoding, self.chunk + decoding
            )
        capture_all(self.fixed, self.steps, self.cache.rows, progress)

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, int]]:
        """One step; the tokens that reached the host, in the order in which they were made."""
        self._admit()
        self._leave()
        work = self._fill() if self.filling else self._decode() if self.decoding else None
        if work is not None:
            self.launched.append(work)
        left = 1 if self.ahead and work is not None else 0
        made: list[tuple[Request, int]] = []
        while len(self.launched) > left:
            launched = self.launched.popleft()
            made += zip(launched.requests, launched.pending.tokens(), strict=True)
        return made

    def end(self, request: Request) -> None:
        """Nothing more for this one: its row and its pages are free."""
        request.over = True
        if request.row < 0:
            self.waiting.remove(request)
            return
        if request in self.filling:
            self.filling.remove(request)
        self.cache.close(request.row)
        self.free_rows.append(request.row)
        request.row = -1

    def _admit(self) -> None:
        while self.waiting and self.free_rows:
            request = self.waiting[0]
            if self.cache.needed(request.tokens) > self.cache.pool.free:
                return  # nobody overtakes it, so it is not kept waiting for ever
            self.waiting.popleft()
            request.row = self.free_rows.pop()
            self.cache.open(request.row, request.tokens)
            self.filling.append(request)

    def _leave(self) -> None:
        """Drop the rows of requests that are over, or whose last token is being made."""
        going = [i for i, r in enumerate(self.decoding) if not r.over and r.launched < r.max_new_tokens]
        if len(going) < len(self.decoding):
            self.steps.keep(going)
            self.decoding = [self.decoding[i] for i in going]

    def _fill(self) -> Launched | None:
        """The next chunk of prompts, first come, first served, and with it a decode step: a new token for each request
        that decodes, and the first for those whose prompt is whole now."""
        ids: list[int] = []
        chunks, ends, whole = [], [], []
        for request in self.filling[:SEQUENCES]:
            piece = request.prompt[request.filled : request.filled + self.chunk - len(ids)]
            if not piece:
                break
            ids += piece
            chunks.append((request.row, len(piece)))
            request.filled += len(piece)
            if request.filled == len(request.prompt):
                ends.append(len(ids) - 1)
                whole.append(request)
        self.filling = self.filling[len(whole) :]
        going, last = list(self.decoding), self.steps.last
        where = [(request.row, request.position) for request in going]
        self._fills.rotate()
        landing = self._fills[0].begin()
        logits = prefill(self.model, self.cache, self.fixed, ids, chunks, ends, where, last)
        requests = going + whole
        if not requests:
            return None
        tokens = logits.argmax(-1)
        draw(tokens, logits, _drawn(requests))
        self.steps.advance(tokens[: len(going)])
        self.steps.join(tokens[len(going) :], [len(r.prompt) for r in whole], [r.row for r in whole])
        self.decoding += whole
        return _launched(requests, landing.send(tokens))

    def _decode(self) -> Launched:
        requests = list(self.decoding)
        return _launched(requests, self.steps.launch_each(_drawn(requests)))


def _launched(requests: list[Request], pending: Pending) -> Launched:
    for request in requests:
        request.launched += 1
    return Launched(requests, pending)


def _drawn(requests: Sequence[Request]) -> list[Drawn]:
    """Those that draw, by how they do it, each with the next number of its own."""
    parts: dict[Sampling, list[int]] = {}
    for i, request in enumerate(requests):
        if request.sampling.temperature > 0:
            parts.setdefault(request.sampling, []).append(i)
    out = []
    for sampling, rows in parts.items():
        numbers = [request.draws.next([0]) for request in (requests[i] for i in rows)]
        everyone = None if len(rows) == len(requests) else rows
        out.append(Drawn(sampling, torch.cat(numbers), everyone))
    return out
