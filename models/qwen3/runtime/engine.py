"""Continuous batching: requests come and go between steps; their keys and values lie in a cache of any format."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ttnn_moe.accelerator import on, on_host
from ttnn_moe.arguments import integer, switch
from ttnn_moe.backend import run
from ttnn_moe.errors import RequestError
from ttnn_moe.kv import formats
from ttnn_moe.kv.cache import RowCache
from ttnn_moe.visible import shown

from ..tokenizer import Tokenizer
from .captured import runner_for
from .graphs import Progress
from .language_model import LanguageModel, SharesSteps, check_model, check_weights, fresh_of
from .life import Life
from .limits import Limits, check_queue, check_room, check_waiting
from .owners import claim, give_up
from .requests import Options, Request, Stats, Token, check_names, check_tokenizer, make_requests
from .sampling import NAN
from .scheduler import Chunk, Scheduler
from .stream import Stream

if TYPE_CHECKING:
    from typing_extensions import Unpack


_PAUSE = 1e-4
"""Seconds for which a stream whose request got no token leaves the lock to threads that wait for it. They would not get
it from one that asks again at once."""


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
        model: whose weights stay in place meanwhile: captured steps hold their addresses, and kernels for int4_24
            scales that fit fp16. Where that changes, the next step raises ContractError.
        rows: requests that run at a time, at most; up to 65,536.
        capacity: tokens of one request, prompt and new ones; default, and at most: the model's context.
        memory: bytes for keys and values; default: as many as rows of this capacity take, but at most 4 GiB, on a GPU
            four fifths of what is free.
        page: tokens of a page; default: the format's. PagedCache takes a power of two, at least 16.
        prefill_chunk: prompt tokens of a step, at most. Default: 256, on a GPU 2048, or 4096 with a bucketed cache,
            less a token of each row; while nobody decodes, 2048 of one prompt, on a GPU 4096.
        max_waiting: requests that may wait, at least 1; more are refused. Default: any number.
        tokenizer: to get text with the tokens.
        graphs: steps are graphs of the device; None: on a GPU or an NPU, where they serve the model and the cache.
        cache: an empty cache of any format, for this model; it says how many rows and tokens at most. Default:
            model.new_cache(rows, capacity, memory, page, kv, kv_bits).
        kv: the format of the cache: "paged", in the model's dtype, or "bucketed", quantised: see docs/kv.md.
        kv_bits: of a bucketed cache, average bits of a number in a full row, from 2 to 16; default: 4.

    Attributes:
        stats: sums over all that the engine did; first_token_s is not measured.

    Raises:
        RequestError: an argument of another type or out of range; memory for less than one page; memory, page or
            kv beside a cache; kv_bits that no tiers reach; a cache that is in use or another engine's, or for another
            model; graphs asked for where they do not serve.

    Any thread may call it; one step runs at a time. What fails for one request ends this request. What fails for a
    whole step (the model, the cache, memory, an interrupt) ends the engine: see `step`. Within a step, a callback or a
    signal handler of the same thread may add, cancel and close; the last two take effect after the step.
    """

    def __init__(
        self,
        model: LanguageModel,
        rows: int = 64,
        capacity: int | None = None,
        *,
        memory: int | None = None,
        page: int | None = None,
        prefill_chunk: int | None = None,
        max_waiting: int | None = None,
        tokenizer: Tokenizer | None = None,
        graphs: bool | None = None,
        cache: RowCache | None = None,
        kv: str = formats.PAGED,
        kv_bits: float | None = None,
    ):
        check_model(model)
        if cache is None:
            formats.check_format(kv, kv_bits)
        limits = Limits(rows, capacity, memory, page, prefill_chunk, max_waiting).checked(model, cache, kv, kv_bits)
        graphs = None if graphs is None else switch("graphs", graphs)
        self.tokenizer = None if tokenizer is None else check_tokenizer(tokenizer)
        self.model, self.rows, self.capacity, self.max_waiting = model, limits.rows, limits.capacity, limits.max_waiting
        sizes = limits.rows, limits.capacity, limits.memory, limits.page
        if cache is None:
            formats.check_budget(kv, kv_bits, limits.capacity, limits.page, model.config.max_position_embeddings)
        with on_host(), on(model.device):
            self.cache = run(model.new_cache, *sizes, kv, kv_bits) if cache is None else cache
            self.runner = runner_for(model, self.cache, limits.prefill_chunk, graphs)
        self.scheduler = Scheduler(self.runner, self.cache, limits.prefill_chunk)
        self.stats = Stats()
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._requests: dict[int, Request] = {}
        self._lost: deque[int] = deque()
        self._chunk: Chunk = limits.prefill_chunk
        self._together: Sequence[Request] = ()  # of the last `run`, until they are over
        self._life, self._made_for = Life(), (model.device, model.dtype)
        self._shared = model if isinstance(model, SharesSteps) else None
        claim(self.cache, self)  # last: an engine that was not made has no cache

    def add(self, prompt: Sequence[int], **options: Unpack[Options]) -> int:
        """Take a request; its number, by which `step` and the others know it.

        Args:
            prompt: token ids. options: see `Options`.

        Raises:
            RequestError: an empty prompt; ids or options of another type or out of range; a request that is too long
                for the context, for a row or for all pages together; too many that wait.
            TypeError: no such option.
        """
        check_names("add", options)
        (request,) = make_requests(
            self.model.config, [prompt], tokenizer=self.tokenizer, fresh=fresh_of(self.model), **options
        )
        with self._lock:
            self._look()
            check_room(request, self.cache, self.capacity)
            check_waiting(len(self.scheduler.waiting), self.max_waiting)
            self._accept(request)
            request.sequence = request.number
            return request.number

    def check_idle(self, requests: Sequence[Request]) -> None:
        """Raise RequestError if these cannot run by themselves: the engine is busy, or would keep too many waiting."""
        with self._lock:
            self._look()
            if not all(request.over for request in self._requests.values()):
                raise RequestError(
                    "the engine serves other requests",
                    got="requests that are not over",
                    expected="an idle engine",
                    remedy="end them (close their streams), or make another engine",
                )
            check_queue(len(requests), self.rows, self.max_waiting)
            for request in requests:
                check_room(request, self.cache, self.capacity)

    def run(self, requests: Sequence[Request], chunk: int | None = None) -> Stream:
        """Take these, from `make_requests`, together. One stream of their tokens, whose `sequence` stays as it is.

        Args:
            chunk: prompt tokens of a step, at most, until all of them are over. Default: the engine's.

        Raises:
            RequestError: as `check_idle`.
        """
        with self._lock:
            self.check_idle(requests)
            self._together = requests
            self.scheduler.chunk = self._chunk if chunk is None else replace(self._chunk, most=chunk, alone=chunk)
            unread: deque[Token] = deque()
            for request in requests:
                request.streamed, request.unread = True, unread
                self._accept(request)
            return Stream(requests, self._next, self.cancel, self._lost)

    def step(self) -> list[Token]:
        """Admit what fits and run one step; the tokens that reached the host, whose `sequence` is the request's number.

        A step is a chunk of the prompts that are not in the cache yet, and a decode step of all other requests.
        With graphs they are those of the step before, which the GPU made while the host prepared this one. A token
        whose `finish` is "error" ends its own request.

        Raises:
            Exception: what the model, the cache or the machine raised. The engine stops: every later call raises
                RequestError with the reason.
        """
        with self._lock:
            return self._step(keep=False)

    def stream(self, number: int) -> Stream:
        """The tokens of a request from now on (and those that other streams' steps made), once.

        The stream raises RequestError where this request alone fails, and RequestError or what a step raised where the
        engine stops.

        Raises:
            RequestError: no such request, or it has a stream; number is no integer of 0 or more.
        """
        with self._lock:
            self._look()
            request = self._find(number)
            if request is None or request.streamed:
                what = "has a stream" if request is not None else "is not known, or over"
                raise RequestError(f"request {shown(number)} {what}", remedy="take a number that add gave, once")
            request.streamed = True
            if request.over:
                del self._requests[request.number]
            return Stream([request], self._next, self.cancel, self._lost)

    def cancel(self, number: int) -> bool:
        """End a request now; its pages are free. False: it is not known, or over.

        Raises:
            RequestError: number is no integer of 0 or more.
        """
        with self._lock:
            request = self._find(number)
            if request is not None and self._life.stepping:
                self._lost.append(request.number)
                return not request.over
            if request is not None:
                del self._requests[request.number]
            if request is None or request.over:
                return False
            if self._life.error is None:
                try:
                    self.scheduler.end(request)
                except BaseException as error:
                    self._life.error = shown(error)  # its row or its pages may be lost
                    raise
            return True

    @torch.inference_mode()  # as the scheduler calls the cache
    def close(self) -> None:
        """End all requests; another engine may have the cache. Every later call but `cancel` and `fits` raises
        RequestError, and so do streams of requests that had not ended. A second call does nothing."""
        with self._lock:
            self._life.closing = self._life.stepping
            if self._life.closed or self._life.closing:
                return
            self._life.closed = True
            requests = list(self._requests.values())
            self._requests.clear()
            self._together = ()
            self.scheduler.launched.clear()
            if self._life.error is None:  # else rows may be lost
                for request in requests:
                    if request.row >= 0:
                        self.cache.close(request.row)
            give_up(self.cache, self)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        with self._lock:
            self._look()
            return any(not request.over for request in self._requests.values()) or bool(self.scheduler.launched)

    def load(self) -> Load:
        """Requests that wait and run, free rows and free pages, now."""
        with self._lock:
            self._look()
            free = len(self.scheduler.free_rows)
            return Load(len(self.scheduler.waiting), self.rows - free, free, self.cache.free)

    def fits(self, tokens: int) -> int:
        """Requests of so many tokens, prompt and new ones, that run at a time; 0: `add` refuses them.

        Raises:
            RequestError: no positive integer.
        """
        tokens = integer("tokens", tokens)
        if tokens > self.capacity:
            return 0
        return min(self.rows, self.cache.total // self.cache.needed(max(tokens - 1, 1)))

    def waits_for(self, number: int) -> str | None:
        """What a request waits for; None: it does not, it is not known, or it is over.

        Raises:
            RequestError: number is no integer of 0 or more.
        """
        with self._lock:
            self._look()
            request = self._find(number)
            return None if request is None else self.scheduler.waits_for(request)

    def capture(self, progress: Progress | None = None) -> None:
        """Capture steps of every size now, instead of when first needed; without graphs, do nothing.

        This also captures prefills of up to 4,096 tokens, as far as prefill_chunk allows. No later call does.

        Args:
            progress: called with graphs captured so far and graphs in all.
        """
        with self._lock, on_host(), on(self.model.device):
            self._life.check_between_steps()
            run(self.runner.capture, progress)

    def forked(self) -> None:
        """For a child process: a step that was under way stays unfinished, and stops the engine there."""
        self._lock = threading.RLock()
        if self._life.stepping:
            self._life.error, self._life.stepping = "a fork of the process", False

    def _find(self, number: object) -> Request | None:
        return self._requests.get(integer("number", number, low=0))

    def _accept(self, request: Request) -> None:
        request.number = next(self._numbers)
        self.stats.prompt_tokens += request.length
        self._requests[request.number] = request
        self.scheduler.waiting.append(request)

    def _step(self, keep: bool) -> list[Token]:
        """keep: put tokens where streams find them, even of requests that have none yet."""
        self._life.check_between_steps()
        check_weights(self.model, self._made_for)
        self._end_lost()
        out: list[Token] = []
        scheduler, stats = self.scheduler, self.stats
        if all(request.over for request in reversed(self._together)):  # the last ones mostly end last
            self._together, scheduler.chunk = (), self._chunk
        try:
            self._life.stepping = True
            with on_host(), on(self.model.device):
                finished = run(scheduler.step)
            if self._shared is not None:
                self._shared.check(any(token == NAN for step in finished for _, token in step.tokens))
            for step in finished:
                before = len(out)
                out += [self._take(request, token, keep) for request, token in step.tokens if not request.over]
                made = len(out) - before
                stats.new_tokens += made
                if step.decoding and made:
                    stats.decode_steps += 1
                    stats.decode_tokens += made
                    stats.decode_s += step.seconds
        except BaseException as error:
            # some of it may have happened; the error itself would hold this engine, and so its memory
            self._life.error = shown(error)
            if self._shared is not None:
                self._shared.fail(error)
            raise
        finally:
            self._life.stepping = False
            if self._life.closing:
                self.close()
        self._end_lost()
        return out

    def _take(self, request: Request, token: int, keep: bool) -> Token:
        event = request.take(token)
        if keep or request.streamed:
            request.unread.append(event)
        if event.finish is not None:
            self.scheduler.end(request)
            if request.streamed or not request.unread:
                del self._requests[request.number]  # a stream knows its own
        return event

    def _look(self) -> None:
        """Refuse to go on after an error, or when closed; end the requests of streams that were lost."""
        self._life.check()
        if not self._life.stepping:
            self._end_lost()

    def _end_lost(self) -> None:
        while self._lost:
            self.cancel(self._lost.popleft())

    def _next(self, requests: Sequence[Request]) -> Token:
        """For a stream of these."""
        unread, token = requests[0].unread, None
        while token is None:
            with self._lock:
                if not unread and not all(request.over for request in requests):
                    self._step(keep=True)
                if unread:
                    token = unread.popleft()
                elif all(request.over for request in requests):
                    raise StopIteration
            if token is None and threading.active_count() > 1:
                time.sleep(_PAUSE)
        if token.error is not None:
            # the token may be kept, and with it the frames of what is raised
            raise copy.copy(token.error) from token.error.__cause__
        return token
