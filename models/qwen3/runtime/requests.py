"""Requests: the one check of what a client asks, how far each has come, and the tokens that it gets."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypedDict

import torch
from torch import Tensor

from ttnn_moe.errors import RequestError

from ..config import Qwen3MoeConfig
from ..tokenizer import TextStream, Tokenizer
from .sampling import Sampling, seeds_of

Finish = Literal["stop", "length"]


class Options(TypedDict, total=False):
    """Keyword arguments that say how prompts are continued.

    Attributes:
        max_new_tokens: per sequence, a stop token included; default: 128.
        temperature, top_k, top_p: see Sampling; default: greedy.
        seed: sequence i draws from seed + i (or from seed[i]) and nothing else; None, the default: fresh every time.
        stop_ids: tokens that end a sequence; default: the eos tokens of the config (and of the tokenizer).
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | Sequence[int] | None
    stop_ids: Sequence[int] | None


@dataclass(frozen=True)
class Token:
    """One new token of one sequence.

    Attributes:
        sequence: number of its request, or index of its prompt where `generate` made it. token: its id.
        text: the text it completes ("" without a tokenizer).
        finish: why the sequence ends with it ("stop", "length"), else None.
    """

    sequence: int
    token: int
    text: str = ""
    finish: Finish | None = None


@dataclass
class Stats:
    """Times in seconds, taken when the tokens are on the host.

    Attributes:
        prompt_tokens, new_tokens: over all sequences.
        first_token_s: from the start until every sequence has its first token.
        decode_s: in decode steps, those that run no prompt. decode_tokens: tokens made in them. decode_steps: their
            number.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0

    @property
    def tokens_per_s_user(self) -> float:
        """Decode steps per second: what one user sees."""
        return self.decode_steps / self.decode_s if self.decode_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second over the batch."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


@dataclass(eq=False)
class Request:
    """A prompt and how far it has come.

    Attributes:
        prompt: [n] int64, on the host.
        number: the engine's name for it; -1: not taken yet. sequence: its tokens carry this.
        row: of the cache; -1: none yet, or no more. filled: prompt tokens in the cache, or on their way there.
        launched, made: new tokens on the device, and on the host. over: no token follows.
        unread: tokens for its stream. streamed: it has one.
    """

    prompt: Tensor
    max_new_tokens: int
    sampling: Sampling
    seed: int
    stop_ids: frozenset[int]
    text: TextStream | None
    sequence: int
    number: int = -1
    row: int = -1
    filled: int = 0
    launched: int = 0
    made: int = 0
    over: bool = False
    streamed: bool = False
    unread: deque[Token] = field(default_factory=deque)

    @cached_property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def tokens(self) -> int:
        """Tokens that the cache keeps of it: the last new one is never fed."""
        return self.length + self.max_new_tokens - 1

    @property
    def position(self) -> int:
        """Position of the new token that is fed next."""
        return self.length + self.launched - 1

    @cached_property
    def generator(self) -> torch.Generator:
        """Made for the first number: a greedy request draws none, and does not wait for it."""
        return torch.Generator().manual_seed(self.seed)

    def draw(self) -> Tensor:
        """Its next uniform number in [0, 1): a scalar, fp64, on the host. It depends on the request's seed alone."""
        return torch.rand((), dtype=torch.float64, generator=self.generator)

    def take(self, token: int) -> Token:
        """The next new token, on the host."""
        self.made += 1
        finish: Finish | None = None
        if token in self.stop_ids:
            finish = "stop"
        elif self.made == self.max_new_tokens:
            finish = "length"
        text = ""
        if self.text is not None:
            text = self.text.push(token) + (self.text.finish() if finish is not None else "")
        return Token(self.sequence, token, text, finish)


def make_requests(
    config: Qwen3MoeConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | Sequence[int] | None = None,
    stop_ids: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
) -> list[Request]:
    """A request for each prompt; see `Options`. Errors as `stream`."""
    sampling = Sampling(temperature, top_k, top_p)
    checked = check_request(config, prompts, max_new_tokens)
    seeds = seeds_of(seed, len(prompts))
    if stop_ids is None:
        eos = tokenizer.eos_token_id if tokenizer is not None else None
        stop_ids = (*config.eos_token_ids, *(() if eos is None else (eos,)))
    stops = frozenset(stop_ids)
    return [
        Request(ids, max_new_tokens, sampling, own, stops, tokenizer.stream() if tokenizer is not None else None, i)
        for i, (ids, own) in enumerate(zip(checked, seeds, strict=True))
    ]


def check_request(config: Qwen3MoeConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Tensor]:
    """The prompts, int64 on the host.

    Raises:
        RequestError: the model cannot serve them.
    """
    context, V = config.max_position_embeddings, config.vocab_size
    if max_new_tokens < 1:
        raise RequestError("max_new_tokens must be positive", got=f"max_new_tokens={max_new_tokens}")
    checked = []
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise RequestError(f"prompt {i} is empty", expected="at least one token")
        if len(prompt) + max_new_tokens > context:
            raise RequestError(
                f"prompt {i} is too long for the context",
                got=f"{len(prompt)} tokens and {max_new_tokens} new ones",
                expected=f"at most {context} together",
                remedy="shorten the prompt or lower max_new_tokens",
            )
        ids = _ids_below(V, prompt)
        if ids is None:
            bad = next(j for j, token in enumerate(prompt) if not 0 <= token < V)
            raise RequestError(
                f"id out of range at position {bad} of prompt {i}", got=prompt[bad], expected=f"0 .. {V - 1}"
            )
        checked.append(ids)
    return checked


def _ids_below(V: int, prompt: Sequence[int]) -> Tensor | None:
    """None: not all of them are 0 .. V - 1."""
    try:
        ids = host_ids(prompt)
    except OverflowError:
        return None
    except TypeError:
        raise RequestError("a prompt is a list of token ids", got=repr(prompt)[:80], remedy="encode it") from None
    least, largest = map(int, ids.aminmax())
    return ids if least >= 0 and largest < V else None


def host_ids(ids: Sequence[int] | Tensor) -> Tensor:
    """int64, on the host. torch.tensor takes twenty times as long, and a GPU waits for it.

    Raises:
        OverflowError: one is negative, or has more than 64 bits.
        TypeError: one is no integer.
    """
    if isinstance(ids, Tensor):
        if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex():
            raise TypeError("not a vector of integers")
        return ids.to("cpu", torch.int64)
    # unsigned: array takes them twice as fast; of bytes it would not take the items
    return torch.frombuffer(array("Q", ids if isinstance(ids, list) else list(ids)), dtype=torch.int64)
