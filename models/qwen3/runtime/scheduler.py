"""Which requests run: rows and pages for those that fit, then a chunk of prompts and a decode step at a time."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

from ttnn_moe.kv.cache import RowCache

from .requests import Request
from .runner import Pending, Prompts, Runner


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens of a step, at most.

    Attributes:
        most: of a step of any prompts. alone: of a step that runs one prompt, while nobody decodes.
        as_alone: a prompt's pieces are those that it has when it is alone; then `alone` is `most`.
    """

    most: int
    alone: int
    as_alone: bool = False


@dataclass(frozen=True)
class Launched:
    """A step under way: a new token for each of these requests.

    Attributes:
        decoding: the step runs no prompt. seconds: what the host took to launch it.
    """

    requests: list[Request]
    pending: Pending
    decoding: bool
    seconds: float


@dataclass(frozen=True)
class Finished:
    """A step that is over.

    Attributes:
        tokens: of requests, in the order of the step; some requests may be over.
        decoding: the step ran no prompt. seconds: what it took, on the host or on the device, whichever is more.
    """

    tokens: list[tuple[Request, int]]
    decoding: bool
    seconds: float


class Scheduler:
    """The requests of an engine, from its queue to their last token.

    It calls its cache and its runner in inference mode, whatever the mode in which they were made.

    Args:
        cache: where keys and values go; it is empty.

    Attributes:
        waiting: requests without pages, in the order in which they came.
        filling: requests whose prompt is not in the cache yet.
        decoding: in the order of the runner's rows; some may be over.
        ahead: see Runner.
    """

    def __init__(self, runner: Runner, cache: RowCache, chunk: Chunk):
        self.runner, self.cache, self.chunk, self.ahead = runner, cache, chunk, runner.ahead
        self.waiting: deque[Request] = deque()
        self.filling: deque[Request] = deque()
        self.decoding: list[Request] = []
        self.free_rows = list(reversed(range(cache.rows)))
        self.launched: deque[Launched] = deque()

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Launch one step; the steps whose tokens reached the host."""
        start = time.perf_counter()
        self._admit()
        self._leave()
        prompts, others = bool(self.filling), bool(self.decoding)
        made = self._fill() if prompts else self._decode() if others else None
        if made is not None:
            self.launched.append(Launched(*made, not prompts, time.perf_counter() - start))
        # first tokens are read at once where the device has nothing else to do: launching the next step may take long
        left = 1 if self.ahead and made is not None and (others or self.filling) else 0
        finished = []
        while len(self.launched) > left:
            finished.append(_read(self.launched.popleft()))
        return finished

    @torch.inference_mode()
    def end(self, request: Request) -> None:
        """Nothing more for this one: its row and its pages are free."""
        request.over = True
        if request.row < 0:
            self.waiting.remove(request)
            return
        if request.filled < request.length:
            self.filling.remove(request)
        self.cache.close(request.row)
        self.free_rows.append(request.row)
        request.row = -1

    def waits_for(self, request: Request) -> str | None:
        """What a request waits for; None: it does not."""
        if request not in self.waiting:
            return None
        before = self.waiting.index(request)
        if before:
            return f"{before} requests that came before"
        if not self.free_rows:
            return f"one of {self.cache.rows} rows"
        needed, free = self.cache.needed(request.tokens), self.cache.free
        return f"{needed} pages of {self.cache.total}: {free} are free" if needed > free else "the next step"

    def _admit(self) -> None:
        while self.waiting and self.free_rows:
            request = self.waiting[0]
            if self.cache.needed(request.tokens) > self.cache.free:
                return  # nobody overtakes it, so it is not kept waiting for ever
            self.waiting.popleft()
            request.row = self.free_rows.pop()
            self.cache.open(request.row, request.tokens)
            self.filling.append(request)

    def _leave(self) -> None:
        """Drop the rows of requests that are over, or whose last token is being made."""
        going = [i for i, r in enumerate(self.decoding) if not r.over and r.launched < r.max_new_tokens]
        if len(going) < len(self.decoding):
            self.runner.keep(going)
            self.decoding = [self.decoding[i] for i in going]

    def _fill(self) -> tuple[list[Request], Pending] | None:
        """The next chunk of prompts, first come, first served, and with it a decode step: a new token for each request
        that decodes, and the first for those whose prompt is whole now."""
        pieces, chunks, ends, whole, fed = [], [], [], [], 0
        most = self._most()
        while self.filling and fed < most:
            request = self.filling[0]
            piece = min(most, request.length - request.filled)
            n = min(most - fed, piece)
            if n < piece and self.chunk.as_alone:
                break
            pieces.append(request.prompt[request.filled : request.filled + n])
            chunks.append((request.row, n))
            fed += n
            request.filled += n
            if request.filled == request.length:
                ends.append(fed - 1)
                whole.append(self.filling.popleft())
        going = self.decoding
        ids = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        pending = self.runner.prefill(Prompts(ids, chunks, ends), going, whole)
        requests = going + whole
        self.decoding = requests
        return _launched(requests, pending) if requests else None

    def _most(self) -> int:
        """Prompt tokens of the next step: more where it runs the first prompt alone and nobody waits for a token."""
        first = self.filling[0]
        left = first.length - first.filled
        return self.chunk.most if self.decoding or left < self.chunk.most else min(left, self.chunk.alone)

    def _decode(self) -> tuple[list[Request], Pending]:
        return _launched(self.decoding, self.runner.decode(self.decoding))


def _launched(requests: list[Request], pending: Pending) -> tuple[list[Request], Pending]:
    for request in requests:
        request.launched += 1
    return requests, pending


def _read(step: Launched) -> Finished:
    start = time.perf_counter()
    tokens = step.pending.tokens()
    seconds = max(step.seconds + time.perf_counter() - start, step.pending.seconds())
    return Finished(list(zip(step.requests, tokens, strict=True)), step.decoding, seconds)
