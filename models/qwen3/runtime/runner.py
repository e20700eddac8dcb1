"""How a step runs. The eager runner works with every model, every cache and every machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ttnn_moe import decoder
from ttnn_moe.decoder import Draw
from ttnn_moe.kv.cache import RowCache
from ttnn_moe.kv.step import PrefillStep, Step
from ttnn_moe.kv.transfer import to_device

from .candidates import draw_among
from .graphs import Progress
from .language_model import LanguageModel, PicksTokens
from .requests import Request
from .sampling import greedy, marked


@dataclass(frozen=True)
class Prompts:
    """Prompts, or pieces of them, that one step runs.

    Attributes:
        ids: [T] int64 tokens on the host, packed. chunks: (cache row, tokens) of each piece, in this order.
        ends: indices within ids of the last tokens of prompts.
    """

    ids: Tensor
    chunks: Sequence[tuple[int, int]]
    ends: Sequence[int]


class Pending(Protocol):
    """Tokens that a step is making."""

    def tokens(self) -> list[int]:
        """Wait for them; NAN where logits are NaN. This is the one synchronisation of a step."""

    def seconds(self) -> float:
        """What the step took on the device, after tokens(); 0 where the host waits for every step."""


class Runner(Protocol):
    """Launches steps of one model on one cache, and keeps the last token of each request that decodes.

    Attributes:
        ahead: a scheduler should launch the next step before it reads the tokens of the last.
    """

    ahead: bool

    def prefill(self, prompts: Prompts, going: Sequence[Request], whole: Sequence[Request]) -> Pending:
        """A step of prompts, together with a decode step. It makes a token for each of `going`, then of `whole`.

        Args:
            going: all requests that decode, in the order in which they joined.
            whole: requests whose prompts end in this step, one for each of prompts.ends; they decode from now on.
        """

    def decode(self, going: Sequence[Request]) -> Pending:
        """A decode step: a token for each of `going`, which are as in `prefill`."""

    def keep(self, places: Sequence[int]) -> None:
        """Of the requests that decode, only these go on: ascending indices of `going`."""

    def capture(self, progress: Progress | None) -> None:
        """Prepare steps of every size now, if this runner prepares any."""


@dataclass(frozen=True)
class Made:
    """Tokens of a step that is over."""

    made: Tensor

    def tokens(self) -> list[int]:
        return self.made.tolist()

    def seconds(self) -> float:
        return 0.0


class EagerRunner:
    """Steps of exact sizes that the host plans. It asks a cache only what RowCache declares."""

    def __init__(self, model: LanguageModel, cache: RowCache):
        self.ahead, self.model, self.cache = False, model, cache
        self._picks = model if isinstance(model, PicksTokens) else None
        self._last = torch.empty(0, dtype=torch.int64, device=model.device)

    def prefill(self, prompts: Prompts, going: Sequence[Request], whole: Sequence[Request]) -> Pending:
        where = [(request.row, request.position) for request in going]
        ids, step = prefill_step(self.model, self.cache, prompts, where, self._last if going else None)
        return self._run(ids, step, [*going, *whole])

    def decode(self, going: Sequence[Request]) -> Pending:
        step = self.cache.decode([request.row for request in going], [request.position for request in going])
        return self._run(self._last, step, going)

    def _run(self, ids: Tensor, step: Step, requests: Sequence[Request]) -> Made:
        """A step, and the tokens that it makes for the requests. A model that picks greedy tokens hides its NaN."""
        if self._picks is None:
            self._last, nan = next_tokens(self.model(ids, self.cache, step), requests)
            return Made(marked(self._last, nan))
        if all(request.sampling.temperature == 0 for request in requests):
            self._last = self._picks.greedy(ids, self.cache, step)
            return Made(self._last)
        found = self._picks.candidates(ids, self.cache, step, [request.sampling for request in requests])
        self._last = found.first.clone()
        draw(self._last, found, requests, draw_among)
        return Made(marked(self._last, found.values.isnan().any(-1)))

    def keep(self, places: Sequence[int]) -> None:
        self._last = self._last[to_device(places, self._last.device)]

    def capture(self, progress: Progress | None) -> None:
        pass


def run_prefill(
    model: LanguageModel, cache: RowCache, prompts: Prompts, decoding: Sequence[tuple[int, int]], last: Tensor | None
) -> Tensor:
    """Logits [len(decoding) + len(prompts.ends), vocab_size] of a prefill step. Arguments as `prefill_step`."""
    ids, step = prefill_step(model, cache, prompts, decoding, last)
    return model(ids, cache, step)


def prefill_step(
    model: LanguageModel, cache: RowCache, prompts: Prompts, decoding: Sequence[tuple[int, int]], last: Tensor | None
) -> tuple[Tensor, PrefillStep]:
    """Ids [T] of a prefill step that the host plans, and the step.

    Args:
        decoding: (row, position) of tokens that run with the prompts, each the next of its row.
        last: these tokens, int64 on the device; None: there are none.
    """
    step = cache.prefill(prompts.chunks, prompts.ends, decoding)
    ids = prompts.ids.to(model.device)
    return (ids if last is None else torch.cat((last, ids))), step


def next_tokens(logits: Tensor, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
    """[R] int64: a token from each row of logits [R, V], as its request asks; [R] bool: whether the row has a NaN."""
    tokens, nan = greedy(logits)
    draw(tokens, logits, requests)
    return tokens, nan


def draw(tokens: Tensor, logits: Any, requests: Sequence[Request], by: Callable[..., None] | None = None) -> None:
    """Put what requests draw from logits [R, V] into tokens [R]; those of greedy requests stay.

    A request for which this fails is told so (Request.fail); the others get their tokens.

    Args:
        logits: what `by` draws from: a tensor, or Candidates.
        by: decoder.draw_tokens (the default), or draw_among.
    """
    by = by or decoder.draw_tokens
    asked = [_asked(i, request) for i, request in enumerate(requests) if request.sampling.temperature > 0]
    if not asked:
        return
    try:
        by(logits, tokens, asked)
    except Exception:
        # each by itself, with the number that it drew
        for one in asked:
            try:
                by(logits, tokens, [one])
            except Exception as error:
                requests[one.row].fail(error)


def _asked(row: int, request: Request) -> Draw:
    how, uniform = request.sampling, 0.0
    try:
        uniform = request.draw()
    except Exception as error:
        request.fail(error)
    return Draw(row, uniform, how.temperature, how.top_k, how.top_p)
