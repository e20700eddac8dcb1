"""Requests: the one check of what a client asks, how far each has come, and the tokens that it gets."""

from __future__ import annotations

import difflib
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypedDict

import torch
from torch import Tensor

from ttnn_moe.arguments import integer
from ttnn_moe.errors import RequestError
from ttnn_moe.visible import shown

from ..text_stream import TextStream
from ..tokenizer import Tokenizer
from .failures import without_frames
from .ids import checked_ids, count_of
from .language_model import LanguageConfig
from .sampling import NAN, Sampling, fresh_seed, seeds_of

Finish = Literal["stop", "length", "error"]


class Options(TypedDict, total=False):
    """Keyword arguments that say how prompts are continued.

    Integers may be Python's, numpy's or torch's; a bool and 2.0 are refused. Floats may be any finite real number.

    Attributes:
        max_new_tokens: per sequence, a stop token included; 1 or more; default: 128.
        temperature, top_k, top_p: see Sampling; default: greedy.
        seed: sequence i draws from seed + i (or from seed[i]) and nothing else; 0 .. 2^63 - 1. None, the default: fresh
            every time.
        stop_ids: tokens that end a sequence, a sequence, a set or a vector of ids of the vocabulary; default: the eos
            tokens of the config (and of the tokenizer).
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | Sequence[int] | None
    stop_ids: Sequence[int] | None


def check_names(function: str, options: Mapping[str, object], kind: type[Options] = Options) -> None:
    """Raise TypeError for the first option that a function, so named, does not have: Python names an inner one.

    Args:
        kind: of its keyword arguments.
    """
    known = list(kind.__annotations__)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; {remedy}")


@dataclass(frozen=True)
class Token:
    """One new token of one sequence.

    Attributes:
        sequence: number of its request, or index of its prompt where `generate` made it. token: its id.
        text: the text it completes ("" without a tokenizer).
        finish: why the sequence ends with it ("stop", "length", "error"), else None.
        error: what ended this sequence alone, where finish is "error"; token is -1 then. Streams raise a copy. Its
            `__cause__` has no traceback, which would hold the engine: TTNN_MOE_LOG=debug prints it.
    """

    sequence: int
    token: int
    text: str = ""
    finish: Finish | None = None
    error: RequestError | None = None


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

    @classmethod
    def together(cls, parts: Sequence[Stats]) -> Stats:
        """Of processes that ran side by side, each with sequences of its own: the slowest one's times and steps."""
        slowest = max(parts, key=lambda part: part.decode_s)
        return cls(
            prompt_tokens=sum(part.prompt_tokens for part in parts),
            new_tokens=sum(part.new_tokens for part in parts),
            first_token_s=max(part.first_token_s for part in parts),
            decode_s=slowest.decode_s,
            decode_tokens=sum(part.decode_tokens for part in parts),
            decode_steps=slowest.decode_steps,
        )

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
        failure: what could not be done for this request alone, and its new tokens before that.
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
    failure: tuple[Exception, int] | None = None

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
    def _uniform(self) -> Callable[[], float]:
        """Made for the first number: a greedy request draws none, and does not wait for it."""
        if self.seed >> 32:  # torch's generator reads 32 bits of a seed
            return random.Random(self.seed).random
        generator = torch.Generator("cpu").manual_seed(self.seed)
        return lambda: torch.rand((), dtype=torch.float64, device="cpu", generator=generator).item()

    def draw(self) -> float:
        """Its next uniform number in [0, 1), which depends on the request's seed alone."""
        return self._uniform()

    def take(self, token: int) -> Token:
        """The next new token, on the host. What fails here is this request's alone: the token says so."""
        self.made += 1
        finish: Finish | None = None
        if token in self.stop_ids:
            finish = "stop"
        elif self.made == self.max_new_tokens:
            finish = "length"
        text = ""
        if self.failure is not None and self.made > self.failure[1]:
            return self._failed(self.failure[0])
        if token == NAN:
            return self._without_numbers()
        if self.text is not None:
            try:
                text = self.text.push(token) + (self.text.finish() if finish is not None else "")
            except Exception as error:
                return self._failed(without_frames(error, self.number))
        return Token(self.sequence, token, text, finish)

    def fail(self, error: Exception) -> None:
        """The token that is being launched cannot be made; those before it may not be on the host yet."""
        self.failure = self.failure or (without_frames(error, self.number), self.launched)

    def _failed(self, error: Exception) -> Token:
        failed = RequestError(
            f"request {self.sequence} ended by an error of its own",
            got=shown(error),
            expected="a token and its text",
            remedy="see the cause; the engine goes on, and the request may be made again",
        )
        failed.__cause__ = error
        return Token(self.sequence, -1, finish="error", error=failed)

    def _without_numbers(self) -> Token:
        error = RequestError(
            f"request {self.sequence} ended: the model gives no numbers",
            got=f"NaN among the logits of new token {self.made}",
            expected="numbers",
            remedy="look for NaN or infinity in the weights, or take a dtype of a larger range",
        )
        return Token(self.sequence, NAN, finish="error", error=error)


def make_requests(
    config: LanguageConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | Sequence[int] | None = None,
    stop_ids: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
    fresh: Callable[[], int] = fresh_seed,
) -> list[Request]:
    """A request for each prompt; see `Options`. No later step raises for what this takes.

    Args:
        fresh: draws a seed where none is given.

    Raises:
        RequestError: a prompt or an option that is not of the type or within the range that `Options` says.
    """
    new = integer("max_new_tokens", max_new_tokens)
    sampling = Sampling(temperature, top_k, top_p)
    checked = check_request(config, prompts, new)
    seeds = seeds_of(seed, len(checked), fresh)
    eos = check_tokenizer(tokenizer).eos_token_id if tokenizer is not None else None
    if stop_ids is None:
        stops = frozenset((*config.eos_token_ids, *(() if eos is None else (eos,))))
    else:
        V = config.vocab_size
        stops = frozenset(checked_ids("stop_ids", stop_ids, V, V, ordered=False).tolist())
    return [
        Request(ids, new, sampling, own, stops, tokenizer.stream() if tokenizer is not None else None, i)
        for i, (ids, own) in enumerate(zip(checked, seeds, strict=True))
    ]


def check_request(config: LanguageConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Tensor]:
    """The prompts, int64 on the host.

    Raises:
        RequestError: the model cannot serve them.
    """
    context, new = config.max_position_embeddings, integer("max_new_tokens", max_new_tokens)
    try:
        B, each = len(prompts), iter(prompts)
    except Exception:  # a number, a generator, a tensor without dimensions
        B, each = -1, iter(())
    if B < 0 or isinstance(prompts, (str, Mapping, Set)):
        raise RequestError(
            "no list of prompts", got=shown(prompts), expected="a sequence of prompts", remedy="give [prompt]"
        )
    checked = []
    for i, prompt in enumerate(each):
        n = count_of(f"prompt {i}", prompt)
        if n + new > context:
            raise RequestError(
                f"prompt {i} is too long for the context",
                got=f"{n} tokens and {new} new ones",
                expected=f"at most {context} together",
                remedy="shorten the prompt, or ask for fewer new tokens",
            )
        ids = checked_ids(f"prompt {i}", prompt, config.vocab_size, n)
        if len(ids) == 0:
            raise RequestError(
                f"prompt {i} is empty", got="no tokens", expected="at least one token", remedy="leave this prompt out"
            )
        checked.append(ids)
    return checked


def check_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """It.

    Raises:
        RequestError: it gives no text for a stream of tokens.
    """
    made = not isinstance(tokenizer, type)
    if made and callable(getattr(tokenizer, "stream", None)) and hasattr(tokenizer, "eos_token_id"):
        return tokenizer
    raise RequestError(
        "no tokenizer", got=shown(tokenizer), expected="a Tokenizer", remedy="make one: Tokenizer.from_directory(DIR)"
    )
