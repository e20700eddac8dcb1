"""Generation: packed, chunked prefill; decoding in a batch that shrinks as sequences end; streaming."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ttnn_moe.errors import RequestError

from .config import Qwen3MoeConfig
from .decode import Pending, Steps
from .model import LanguageModel
from .prefill import host_ids
from .sampling import Draws, Sampling, choose
from .session import Session
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
    model: LanguageModel,
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
    prefill_chunk: int | None = None,
    session: Session | None = None,
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
        session=session,
        stats=result.stats,
    ):
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
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | Sequence[int] | None = None,
    stop_ids: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
    prefill_chunk: int | None = None,
    session: Session | None = None,
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
        prefill_chunk: prompt tokens per forward pass at most; bounds the memory of long prompts. Default: see
            `default_chunk`.
        session: of this model, to generate with again and again; default: one for this call.
        stats: filled in as tokens come.

    Raises (before any work):
        RequestError: an empty prompt, one too long for the context, ids or options out of range; a session that
            is busy, too small, or another model's.
    """
    sampling = Sampling(temperature, top_k, top_p)
    chunk = default_chunk(model.device) if prefill_chunk is None else prefill_chunk
    ids = check_request(model.config, prompts, max_new_tokens, chunk)
    if session is not None:
        if session.model is not model:
            raise RequestError("the session is another model's", remedy="make one of this model")
        session.check(prompts, max_new_tokens)
    draws = Draws.of(seed, len(prompts))
    if stop_ids is None:
        eos = tokenizer.eos_token_id if tokenizer is not None else None
        stop_ids = (*model.config.eos_token_ids, *(() if eos is None else (eos,)))
    texts = [tokenizer.stream() for _ in prompts] if tokenizer is not None else None
    run = _Run(model, ids, max_new_tokens, sampling, draws, frozenset(stop_ids), texts, stats or Stats(), session)
    return run.tokens(chunk)


def default_chunk(device: torch.device) -> int:
    """Prompt tokens per forward pass: a GPU needs more of them to be busy."""
    return 8192 if device.type == "cuda" else 2048


def check_request(
    config: Qwen3MoeConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int, prefill_chunk: int = 1
) -> list[Tensor]:
    """The prompts, int64 on the host; raises RequestError if they cannot be served."""
    context, V = config.max_position_embeddings, config.vocab_size
    if max_new_tokens < 1 or prefill_chunk < 1:
        raise RequestError(
            "token counts must be positive", got=f"max_new_tokens={max_new_tokens}, prefill_chunk={prefill_chunk}"
        )
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
    least, largest = map(int, ids.aminmax())
    return ids if least >= 0 and largest < V else None


class _Clock:
    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last time."""
        now = time.perf_counter()
        before, self._last = self._last, now
        return now - before


@dataclass
class _Run:
    model: LanguageModel
    prompts: Sequence[Tensor]
    max_new_tokens: int
    sampling: Sampling
    draws: Draws
    stop_ids: frozenset[int]
    texts: list[TextStream] | None
    stats: Stats

    session: Session | None = None

    @torch.inference_mode()
    def tokens(self, prefill_chunk: int) -> Iterator[Token]:
        if not self.prompts:
            return
        start = time.perf_counter()
        session = self.session or Session.of(self.model, self.prompts, self.max_new_tokens)
        session.check(self.prompts, self.max_new_tokens)
        self.stats.prompt_tokens = sum(map(len, self.prompts))
        with session.serving(len(self.prompts)):
            pending = session.steps.begin(self._prefill(session, prefill_chunk))
            pending.tokens()  # nothing delays the first: launching the next step may have to capture it
            self.stats.first_token_s = time.perf_counter() - start
            yield from self._decode(session.steps, pending)

    def _decode(self, steps: Steps, pending: Pending) -> Iterator[Token]:
        """Yield the first tokens and go on from them. The next step is launched before the tokens of the last are read:
        else the device would wait for the host."""
        stats, final = self.stats, self.max_new_tokens
        rows = own = list(range(len(self.prompts)))  # the sequence of each row in use, and of each in the pending step
        over: set[int] = set()
        launching = 0.0  # what the pending step took of the host
        for made in range(1, final + 1):
            clock = _Clock()
            ahead = steps.launch(self.sampling, self._uniform(rows)) if steps.ahead and made < final else None
            launching_ahead = clock.lap()
            last = pending.tokens()
            if made > 1:
                stats.decode_steps += 1
                # what the caller does with a token is not ours
                stats.decode_s += max(launching + clock.lap(), pending.seconds())
            for sequence, token in zip(own, last, strict=True):
                if sequence in over:  # it ended when this step was under way
                    continue
                stats.new_tokens += 1
                stats.decode_tokens += made > 1
                event = self._event(sequence, token, made)
                if event.finish is not None:
                    over.add(sequence)
                yield event
            if len(over) == len(self.prompts):
                return
            clock, own = _Clock(), rows
            going = [row for row, sequence in enumerate(rows) if sequence not in over]
            if len(going) < len(rows):
                steps.keep(going)
                rows = [rows[row] for row in going]
            if ahead is None:
                own, ahead = rows, steps.launch(self.sampling, self._uniform(rows))
            pending, launching = ahead, launching_ahead + clock.lap()

    def _prefill(self, session: Session, chunk: int) -> Tensor:
        """Run the prompts, `chunk` packed tokens at a time; the first new token of each sequence, on the device."""
        first: list[Tensor] = []
        row, done = 0, 0
        while row < len(self.prompts):
            pieces: list[Tensor] = []
            chunks, ends, packed = [], [], 0
            while row < len(self.prompts) and packed < chunk:
                piece = self.prompts[row][done : done + chunk - packed]
                n = len(piece)
                pieces.append(piece)
                chunks.append((row, n))
                done, packed = done + n, packed + n
                if done == len(self.prompts[row]):
                    ends.append((row, packed - 1))
                    row, done = row + 1, 0
            logits = session.prefill(torch.cat(pieces), chunks, [at for _, at in ends])
            if ends:
                first.append(self._choose(logits, [sequence for sequence, _ in ends]))
        return torch.cat(first)

    def _choose(self, logits: Tensor, sequences: Sequence[int]) -> Tensor:
        uniform = self._uniform(sequences)
        return choose(logits, self.sampling, None if uniform is None else uniform.to(logits.device))

    def _uniform(self, sequences: Sequence[int]) -> Tensor | None:
        return self.draws.next(sequences) if self.sampling.temperature > 0 else None

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
