"""Continuous batching: requests come and go between decode steps; their keys and values lie in pages."""

from __future__ import annotations

import itertools
import operator
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ttnn_moe.errors import RequestError
from ttnn_moe.kv.paged import PAGE, PagedCache

from .batch import Batch
from .decode import bucket
from .generate import Token, check_request
from .model import Qwen3Moe
from .prefill import Progress
from .requests import Request, Stream
from .sampling import Draws, Sampling
from .session import serves
from .tokenizer import Tokenizer

STEP = 2048
"""Tokens of a step on a GPU, unless asked for otherwise: more at a time would keep those that decode waiting."""


@dataclass(frozen=True)
class Load:
    """Requests that wait and that have rows; rows and pages that are free."""

    waiting: int
    running: int
    free_rows: int
    free_pages: int


class Engine:
    """Serves requests that come at any time. A request keeps the pages of its whole length from its first step to its
    end, so that none is ever interrupted; until they are free it waits, first come, first served.

    Args:
        model: whose weights stay in place meanwhile: captured steps hold their addresses.
        rows: requests that run at a time, at most.
        capacity: tokens of one request, prompt and new ones; default: the model's context.
        memory: bytes for keys and values; default: as many as rows of this capacity take, but at most 4 GiB, on a GPU
            four fifths of what is free.
        page: tokens of a page: a power of two, at least 16.
        prefill_chunk: prompt tokens of a step, at most; default: 256, on a GPU 2048 less a token of each row.
        max_waiting: requests that may wait; more are refused. Default: any number.
        tokenizer: to get text with the tokens.
        graphs: steps are CUDA graphs; None: where they serve the model.

    Raises:
        RequestError: sizes below 1; memory for less than one page; graphs asked for where they do not serve.

    Any thread may call it; one step runs at a time.
    """

    def __init__(
        self,
        model: Qwen3Moe,
        rows: int = 64,
        capacity: int | None = None,
        *,
        memory: int | None = None,
        page: int = PAGE,
        prefill_chunk: int | None = None,
        max_waiting: int | None = None,
        tokenizer: Tokenizer | None = None,
        graphs: bool | None = None,
    ):
        cuda, served = model.device.type == "cuda", serves(model)
        self.model, self.rows, self.tokenizer, self.max_waiting = model, rows, tokenizer, max_waiting
        self.capacity = model.config.max_position_embeddings if capacity is None else capacity
        chunk = (max(256, STEP - bucket(rows)) if cuda else 256) if prefill_chunk is None else prefill_chunk
        if min(rows, self.capacity, chunk) < 1:
            got = f"rows={rows}, capacity={self.capacity}, prefill_chunk={chunk}"
            raise RequestError("an engine needs room", got=got, expected="1 or more")
        if graphs and not (cuda and served):
            raise RequestError(
                "this model has no step that can be captured",
                got=f"a model on {model.device}",
                expected="what Session expects of one",
                remedy="graphs=None",
            )
        pages = self._pages(memory, page)
        self.cache = PagedCache(model.cache_sizes, rows, self.capacity, pages, page)
        self.batch = Batch(model, self.cache, chunk, cuda and served and graphs is not False)
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._requests: dict[int, Request] = {}
        self._lost: deque[int] = deque()
        self._error: BaseException | None = None

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop_ids: Sequence[int] | None = None,
    ) -> int:
        """Take a request; its number, by which `step` and the others know it. Arguments as `generate`.

        Raises:
            RequestError: an empty prompt, ids or options out of range; a request that is too long for the context, for
                a row or for all pages together; too many that wait.
        """
        sampling = Sampling(temperature, top_k, top_p)
        try:
            prompt = [operator.index(token) for token in prompt]
        except TypeError:
            raise RequestError("a prompt is a list of token ids", got=repr(prompt)[:80], remedy="encode it") from None
        check_request(self.model.config, [prompt], max_new_tokens)
        if stop_ids is None:
            eos = self.tokenizer.eos_token_id if self.tokenizer is not None else None
            stop_ids = (*self.model.config.eos_token_ids, *(() if eos is None else (eos,)))
        text = self.tokenizer.stream() if self.tokenizer is not None else None
        with self._lock:
            self._look()
            request = Request(prompt, max_new_tokens, sampling, Draws.of(seed, 1), frozenset(stop_ids), text)
            self._check_room(request)
            request.number = next(self._numbers)
            self._requests[request.number] = request
            self.batch.waiting.append(request)
            return request.number

    def step(self) -> list[Token]:
        """Admit what fits, run a chunk of the prompts that are not in the cache yet, together with a decode step of all
        requests whose prompt is, and return the tokens that reached the host (`sequence` is the request's number).

        With graphs they are those of the step before, which the GPU made while the host prepared this one.
        """
        with self._lock:
            return self._step(keep=False)

    def stream(self, number: int) -> Stream:
        """The tokens of a request from now on (and those that other streams' steps made), once.

        Raises:
            RequestError: no such request, or it has a stream.
        """
        with self._lock:
            self._look()
            request = self._requests.get(number)
            if request is None or request.streamed:
                what = "has a stream" if request is not None else "is not known, or over"
                raise RequestError(f"request {number} {what}", remedy="take a number that add gave, once")
            request.streamed = True
            return Stream(self, request)

    def cancel(self, number: int) -> bool:
        """End a request now; its pages are free. False: it is not known, or over."""
        with self._lock:
            request = self._requests.pop(number, None)
            if request is None or request.over:
                return False
            if self._error is None:
                self.batch.end(request)
            return True

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        with self._lock:
            self._look()
            return any(not request.over for request in self._requests.values()) or bool(self.batch.launched)

    def load(self) -> Load:
        with self._lock:
            self._look()
            running = self.rows - len(self.batch.free_rows)
            return Load(len(self.batch.waiting), running, len(self.batch.free_rows), self.cache.pool.free)

    def fits(self, tokens: int) -> int:
        """Requests of so many tokens, prompt and new ones, that run at a time."""
        return min(self.rows, self.cache.pool.n // self.cache.needed(max(tokens - 1, 1)))

    def waits_for(self, number: int) -> str | None:
        """What a request waits for; None: it does not."""
        with self._lock:
            self._look()
            places = {request.number: place for place, request in enumerate(self.batch.waiting)}
            if number not in places:
                return None
            if places[number]:
                return f"{places[number]} requests that came before"
            if not self.batch.free_rows:
                return f"one of {self.rows} rows"
            needed, free = self.cache.needed(self._requests[number].tokens), self.cache.pool.free
            return f"{needed} pages of {self.cache.pool.n}: {free} are free" if needed > free else "the next step"

    def capture(self, progress: Progress | None = None) -> None:
        """Capture the steps of every size now, rather than when first needed, and prefills of up to prefill_chunk
        tokens (4,096 at most), which otherwise are not captured at all; nothing without graphs. progress: see
        Session.capture."""
        with self._lock:
            if self.batch.graphs:
                self.batch.capture(progress)

    def _step(self, keep: bool) -> list[Token]:
        """keep: put tokens where streams find them, even of requests that have none yet."""
        self._look()
        try:
            made = self.batch.step()
            return [self._take(request, token, keep) for request, token in made if not request.over]
        except BaseException as error:
            self._error = error  # some of it may have happened
            raise

    def _take(self, request: Request, token: int, keep: bool) -> Token:
        event = request.take(token)
        if keep or request.streamed:
            request.unread.append(event)
        if event.finish is not None:
            self.batch.end(request)
            if not request.unread:
                del self._requests[request.number]
        return event

    def _look(self) -> None:
        """Refuse to go on after an error; end the requests of streams that were lost."""
        if self._error is not None:
            raise RequestError("the engine stopped in a step", got=repr(self._error), remedy="make another engine")
        while self._lost:
            self.cancel(self._lost.popleft())

    def _next(self, request: Request) -> Token:
        """For a stream."""
        with self._lock:
            while not request.unread:
                if request.over:
                    raise StopIteration
                self._step(keep=True)
            token = request.unread.popleft()
            if token.finish is not None:
                self._requests.pop(request.number, None)
            return token

    def _pages(self, memory: int | None, page: int) -> int:
        if page < 1:
            raise RequestError("a page has the wrong size", got=page, expected="a power of two, at least 16")
        one = PagedCache.page_bytes(self.model.cache_sizes, page)
        most = self.rows * -(-self.capacity // page)
        if memory is None:
            memory = 4 << 30
            if self.model.device.type == "cuda":
                memory = torch.cuda.mem_get_info(self.model.device)[0] // 5 * 4
        if memory < one:
            raise RequestError(
                "the memory holds no page of keys and values",
                got=f"{memory:,} bytes",
                expected=f"at least {one:,} (of {page} tokens)",
                remedy="give more memory",
            )
        return min(most, memory // one)

    def _check_room(self, request: Request) -> None:
        """Refuse what could never run."""
        asked = f"{len(request.prompt)} tokens and {request.max_new_tokens} new ones"
        if len(request.prompt) + request.max_new_tokens > self.capacity:
            raise RequestError(
                "the request is too long for a row of the engine",
                got=asked,
                expected=f"at most {self.capacity} together",
                remedy="shorten it, or make the engine with a larger capacity",
            )
        needed, pages = self.cache.needed(request.tokens), self.cache.pool.n
        if needed > pages:
            raise RequestError(
                "the request does not fit the engine's memory, even alone",
                got=f"{asked}, which take {needed} pages",
                expected=f"at most {pages} pages of {self.cache.page} tokens",
                remedy="shorten it, or make the engine with more memory",
            )
        if self.max_waiting is not None and len(self.batch.waiting) >= self.max_waiting:
            raise RequestError(
                "too many requests wait",
                got=f"{len(self.batch.waiting)} that came before",
                expected=f"fewer than {self.max_waiting}",
                remedy="step the engine, ask later, or make it with a larger max_waiting",
            )
