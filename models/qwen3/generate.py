"""Generation: packed, chunked prefill; decoding in a batch that shrinks as sequences end; streaming."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ttnn_moe.errors import RequestError

from .cache import StaticCache
from .config import Qwen3MoeConfig
from .model import Qwen3Moe
from .sampling import Draws, Sampling, choose
from .tokenizer import TextStream, Tokenizer

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Token:
    """One new token of one sequence.

    Attributes:
        sequence: index of its prompt. token: its id. text: the text it completes ("" without a tokenizer).
        finish: why the sequence ends with it ("stop", "length"), else None.
    """

    sequence: int
    token: int
    text: str = ""
    finish: Finish | None = None


@dataclass
class Stats:
    """Times of one generation, in seconds, taken when the tokens are on the host.

    Attributes:
        prompt_tokens, new_tokens: over all sequences.
        first_token_s: from the start until every sequence has its first token.
        decode_s: in decode steps. decode_tokens: tokens made in them. decode_steps: their number.
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


@dataclass
class Generation:
    """Per prompt: new token ids (a stop token included), their text, and why it ended."""

    tokens: list[list[int]]
    texts: list[str]
    finish: list[Finish | None]
    stats: Stats = field(default_factory=Stats)


def generate(
    model: Qwen3Moe,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | Sequence[int] | None = None,
    stop_ids: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
    on_token: Callable[[Token], None] | None = None,
    prefill_chunk: int = 2048,
) -> Generation:
    """Continue each prompt; arguments and errors as `stream`. on_token gets every token as it comes."""
    result = Generation([[] for _ in prompts], ["" for _ in prompts], [None for _ in prompts])
    for token in stream(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_ids=stop_ids,
        tokenizer=tokenizer,
        prefill_chunk=prefill_chunk,
        stats=result.stats,
    ):
        result.tokens[token.sequence].append(token.token)
        result.texts[token.sequence] += token.text
        result.finish[token.sequence] = token.finish
        if on_token is not None:
            on_token(token)
    return result


def stream(
    model: Qwen3Moe,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | Sequence[int] | None = None,
    stop_ids: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
    prefill_chunk: int = 2048,
    stats: Stats | None = None,
) -> Iterator[Token]:
    """Continue each prompt, yielding tokens as they come, sequence by sequence within a step.

    Prompts of different lengths run in one batch without padding: each gets what it would get alone.

    Args:
        prompts: token ids, at least one each.
        max_new_tokens: per sequence, a stop token included.
        temperature, top_k, top_p: see Sampling; temperature 0 is greedy.
        seed: sequence i draws from seed + i (or from seed[i]) and nothing else; None = fresh every time.
        stop_ids: tokens that end a sequence; default: the eos tokens of the config (and of the tokenizer).
        tokenizer: to get text with the tokens.
        prefill_chunk: prompt tokens per forward pass at most; bounds the memory of long prompts.
        stats: filled in as tokens come.

    Raises (before any work):
        RequestError: an empty prompt, one too long for the context, ids or options out of range.
    """
    sampling = Sampling(temperature, top_k, top_p)
    check_request(model.config, prompts, max_new_tokens, prefill_chunk)
    draws = Draws.of(seed, len(prompts))
    if stop_ids is None:
        eos = tokenizer.eos_token_id if tokenizer is not None else None
        stop_ids = (*model.config.eos_token_ids, *(() if eos is None else (eos,)))
    texts = [tokenizer.stream() for _ in prompts] if tokenizer is not None else None
    run = _Run(model, prompts, max_new_tokens, sampling, draws, frozenset(stop_ids), texts, stats or Stats())
    return run.tokens(prefill_chunk)


def check_request(
    config: Qwen3MoeConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int, prefill_chunk: int = 1
) -> None:
    """Raise RequestError if these prompts cannot be served."""
    context, V = config.max_position_embeddings, config.vocab_size
    if max_new_tokens < 1 or prefill_chunk < 1:
        raise RequestError(
            "token counts must be positive",
            got=f"max_new_tokens={max_new_tokens}, prefill_chunk={prefill_chunk}",
        )
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
        bad = next((j for j, token in enumerate(prompt) if not 0 <= token < V), None)
        if bad is not None:
            raise RequestError(
                f"id out of range at position {bad} of prompt {i}", got=prompt[bad], expected=f"0 .. {V - 1}"
            )


@dataclass
class _Run:
    model: Qwen3Moe
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    sampling: Sampling
    draws: Draws
    stop_ids: frozenset[int]
    texts: list[TextStream] | None
    stats: Stats

    @torch.inference_mode()
    def tokens(self, prefill_chunk: int) -> Iterator[Token]:
        if not self.prompts:
            return
        start = time.perf_counter()
        model, stats = self.model, self.stats
        stats.prompt_tokens = sum(map(len, self.prompts))
        capacity = max(map(len, self.prompts)) + self.max_new_tokens - 1
        cache = StaticCache(model.config, len(self.prompts), capacity, model.dtype, model.device)
        last = self._prefill(cache, prefill_chunk)
        stats.first_token_s = time.perf_counter() - start
        rows = list(range(len(self.prompts)))  # the sequence of each cache row
        for made in range(1, self.max_new_tokens + 1):
            stats.new_tokens += len(rows)
            if made > 1:
                stats.decode_steps += 1
                stats.decode_tokens += len(rows)
            going = []
            for row, (sequence, token) in enumerate(zip(rows, last, strict=True)):
                event = self._event(sequence, token, made)
                if event.finish is None:
                    going.append(row)
                yield event
            if not going:
                return
            if len(going) < len(rows):
                cache.keep(going)
                rows, last = [rows[row] for row in going], [last[row] for row in going]
            start = time.perf_counter()
            ids = torch.tensor(last, device=model.device)
            last = self._choose(model(ids, cache, cache.decode()), rows)
            stats.decode_s += time.perf_counter() - start  # what the caller does with a token is not ours

    def _prefill(self, cache: StaticCache, chunk: int) -> list[int]:
        """Run the prompts, `chunk` packed tokens at a time; the first new token of each sequence."""
        first: list[int] = []
        row, done = 0, 0
        while row < len(self.prompts):
            ids: list[int] = []
            chunks, ends = [], []
            while row < len(self.prompts) and len(ids) < chunk:
                piece = self.prompts[row][done : done + chunk - len(ids)]
                ids.extend(piece)
                chunks.append((row, len(piece)))
                done += len(piece)
                if done == len(self.prompts[row]):
                    ends.append((row, len(ids) - 1))
                    row, done = row + 1, 0
            step = cache.prefill(chunks, [at for _, at in ends])
            logits = self.model(torch.tensor(ids, device=self.model.device), cache, step)
            first += self._choose(logits, [sequence for sequence, _ in ends])
        return first

    def _choose(self, logits: torch.Tensor, sequences: Sequence[int]) -> list[int]:
        uniform = None
        if self.sampling.temperature > 0:
            uniform = self.draws.next(sequences).to(logits.device)
        return choose(logits, self.sampling, uniform).tolist()  # the one synchronisation of a step

    def _event(self, sequence: int, token: int, made: int) -> Token:
        finish: Finish | None = None
        if token in self.stop_ids:
            finish = "stop"
        elif made == self.max_new_tokens:
            finish = "length"
        text = ""
        if self.texts is not None:
            text = self.texts[sequence].push(token)
            if finish is not None:
                text += self.texts[sequence].finish()
        return Token(sequence, token, text, finish)
