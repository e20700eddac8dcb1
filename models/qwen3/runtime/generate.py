"""Generation of text for a batch of prompts: add the requests to an engine, then drain it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence, Sized
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ttnn_moe.accelerator import is_accelerator
from ttnn_moe.arguments import integer
from ttnn_moe.errors import RequestError
from ttnn_moe.kv.formats import PAGED, check_budget, least_capacity
from ttnn_moe.visible import shown

from ..tokenizer import Tokenizer
from .engine import Engine
from .language_model import LanguageModel, check_model, fresh_of
from .requests import Finish, Options, Request, Stats, Token, check_names, make_requests

if TYPE_CHECKING:
    from typing_extensions import Unpack


class StreamOptions(Options, total=False):
    """Keyword arguments of `generate`; see `stream`."""

    tokenizer: Tokenizer | None
    prefill_chunk: int | None
    engine: Engine | None


@dataclass
class Generation:
    """Per prompt: new token ids (a stop token included), their text, and why it ended."""

    tokens: list[list[int]]
    texts: list[str]
    finish: list[Finish | None]
    stats: Stats = field(default_factory=Stats)


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    on_token: Callable[[Token], None] | None = None,
    **options: Unpack[StreamOptions],
) -> Generation:
    """Continue each prompt; arguments and errors as `stream`.

    Args:
        on_token: gets every token as it comes. What it raises ends this call and its requests; others of the engine
            go on.
    """
    if on_token is not None and not callable(on_token):
        raise RequestError(
            "on_token is no function", got=shown(on_token), expected="a function of a Token", remedy="leave it out"
        )
    check_names("generate", options, StreamOptions)
    stats = Stats()
    made = stream(model, prompts, stats=stats, **options)
    B = len(prompts)
    result = Generation([[] for _ in range(B)], [""] * B, [None] * B, stats)
    with closing(made):
        for token in made:
            result.tokens[token.sequence].append(token.token)
            result.texts[token.sequence] += token.text
            result.finish[token.sequence] = token.finish
            if on_token is not None:
                on_token(token)
    return result


def stream(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    tokenizer: Tokenizer | None = None,
    prefill_chunk: int | None = None,
    engine: Engine | None = None,
    stats: Stats | None = None,
    **options: Unpack[Options],
) -> Generator[Token, None, None]:
    """Continue each prompt, yielding tokens as they come, sequence by sequence within a step.

    Prompts of different lengths run in one batch without padding: each gets what it would get alone.

    Args:
        prompts: token ids, at least one each.
        tokenizer: to get text with the tokens.
        prefill_chunk: prompt tokens per forward pass at most; bounds the memory of long prompts. Default: the given
            engine's, else see `default_chunk`.
        engine: of this model, to generate with again and again; more prompts than its rows wait for a row. Default:
            one for this call, with a row for each prompt.
        stats: filled in as tokens come.
        options: see `Options`.

    Raises (before any work):
        RequestError: an empty prompt, one too long for the context, ids or options of another type or out of range;
            an engine that is busy or another model's, or would keep more than its max_waiting waiting.
        TypeError: no such option.

    Raises (while it runs):
        RequestError: what ended one of the requests alone, its `__cause__`; the other prompts of this call end too.
        Exception: see Engine.step.
    """
    check_model(model)
    check_names("stream", options)
    prefill_chunk = None if prefill_chunk is None else integer("prefill_chunk", prefill_chunk)
    requests = make_requests(model.config, prompts, tokenizer=tokenizer, fresh=fresh_of(model), **options)
    if engine is not None:
        if not isinstance(engine, Engine) or engine.model is not model:
            raise RequestError(
                "the engine is another model's",
                got=shown(engine),
                expected="an Engine",
                remedy="make one of this model",
            )
        engine.check_idle(requests)
    return _drain(model, requests, engine, prefill_chunk, Stats() if stats is None else stats)


def default_chunk(device: torch.device) -> int:
    """Prompt tokens per forward pass: a GPU needs more of them to be busy."""
    return 8192 if is_accelerator(device) else 2048


def check_fits(engine: Engine, sequences: int, tokens: int, remedy: str) -> None:
    """Raise RequestError where an engine's cache does not hold so many sequences of so many tokens at a time."""
    if (fit := engine.fits(tokens)) < sequences:
        raise RequestError(
            "the memory for keys and values does not hold all sequences",
            got=f"{sequences} sequences of {tokens} tokens",
            expected=f"at most {fit} of them",
            remedy=remedy,
        )


def capacity_for(tokens: int, context: int, kv: str = PAGED, kv_bits: float | None = None) -> int:
    """Tokens of a row of `engine_for`, which holds sequences of so many. Rows of a bucketed cache may be longer: rows
    that are too short reach no low budget.

    Raises:
        RequestError: no row within the context reaches the budget.
    """
    capacity = min(least_capacity(kv, kv_bits, tokens, context), context)
    check_budget(kv, kv_bits, capacity, None, context)
    return capacity


def engine_for(
    model: LanguageModel,
    prompts: Sequence[Sized],
    max_new_tokens: int,
    kv: str = PAGED,
    kv_bits: float | None = None,
    memory: int | None = None,
) -> Engine:
    """An engine that just holds these prompts and their continuations, for `generate`.

    Args:
        kv, kv_bits, memory: see Engine, which bounds the default memory.

    Raises:
        RequestError: as Engine.
    """
    context = model.config.max_position_embeddings
    capacity = capacity_for(max(map(len, prompts)) + max_new_tokens, context, kv, kv_bits)
    chunk = default_chunk(model.device)
    return Engine(model, len(prompts), capacity, memory=memory, prefill_chunk=chunk, kv=kv, kv_bits=kv_bits)


def _drain(
    model: LanguageModel, requests: list[Request], engine: Engine | None, chunk: int | None, stats: Stats
) -> Generator[Token, None, None]:
    if not requests:
        return
    mark = time.perf_counter()
    if engine is None:
        engine = engine_for(model, [request.prompt for request in requests], requests[0].max_new_tokens)
    ran = engine.stats
    decode_s, decode_tokens, decode_steps = ran.decode_s, ran.decode_tokens, ran.decode_steps
    stats.prompt_tokens = sum(request.length for request in requests)
    first = set(range(min(len(requests), engine.rows)))  # sequences that start at once and have no token yet
    with engine.run(requests, chunk) as tokens:
        for token in tokens:
            stats.new_tokens += 1
            stats.decode_s = ran.decode_s - decode_s
            stats.decode_tokens = ran.decode_tokens - decode_tokens
            stats.decode_steps = ran.decode_steps - decode_steps
            if not first:
                yield token
                continue
            # what the caller does with a token is not ours
            spent = time.perf_counter() - mark
            first.discard(token.sequence)
            stats.first_token_s += spent
            yield token
            mark = time.perf_counter()
