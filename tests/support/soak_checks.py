"""What the soak finds out: what every client got, against the same request alone; and counts."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

import torch

from soak_requests import Ask, Fault
from ttnn_moe.errors import RequestError
from ttnn_moe.models.qwen3 import Qwen3Moe, Tokenizer, generate
from ttnn_moe.models.qwen3.runtime.ids import host_ids
from ttnn_moe.models.qwen3.runtime.requests import Token
from ttnn_moe.models.qwen3.runtime.sampling import Sampling, choose

ROUNDING = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.3}
"""Logits of a batch and of one sequence may differ by so much."""


@dataclass
class Outcome:
    """What a client got.

    Attributes:
        finish: of the last token; None: the client went away, or cancelled.
        error: what ended the request alone.
    """

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    error: RequestError | None = None

    def take(self, token: Token) -> None:
        assert self.finish is None and self.error is None, "a token after the last"
        self.finish, self.error = token.finish, token.error
        if token.error is None:
            self.tokens.append(token.token)
            self.text += token.text


class Book:
    """Outcomes of a round, counts of all rounds, and problems. Threads may write."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.outcomes: list[Outcome] = []
        self.cancelled: set[int] = set()
        self._lock = threading.Lock()

    def count(self, what: str, n: int = 1) -> None:
        with self._lock:
            self.counts[what] += n

    def problem(self, what: str) -> None:
        with self._lock:
            self.problems.append(what)

    def refused(self, ask: Ask, error: RequestError) -> None:
        """The engine did not take a request."""
        words = str(error)
        if None in (error.got, error.expected, error.remedy) or len(words) > 1000:
            self.problem(f"an error without words: {words[:200]}")
        if "too many requests wait" in words:
            self.count("refused: too many wait")
        elif ask.kind != "good" or "even alone" in words:
            self.count("refused: too large" if ask.kind != "bad" else "refused: bad arguments")
        else:
            self.problem(f"a good request was refused: {words[:200]}")

    def compare(self, model: Qwen3Moe, tokenizer: Tokenizer | None) -> None:
        """Every outcome with the request alone."""
        for outcome in self.outcomes:
            self._compare(outcome, model, tokenizer)
        self.outcomes, self.cancelled = [], set()

    def _compare(self, outcome: Outcome, model: Qwen3Moe, tokenizer: Tokenizer | None) -> None:
        ask, have, finish, error = outcome.ask, outcome.tokens, outcome.finish, outcome.error
        alone = generate(model, [ask.prompt], tokenizer=tokenizer, **ask.options)
        want = alone.tokens[0]
        self.count("tokens compared", len(have))
        how = "failed alone" if error else "cut off by their client" if finish is None else "finished"
        self.count(f"requests {how}")
        at = next((i for i, (one, other) in enumerate(zip(have, want, strict=False)) if one != other), None)
        if at is not None:
            if all(explained(model, ask, have, i) for i in range(at, len(have))):
                self.count("differences that rounding explains")
            else:
                self.problem(f"{ask}: got {have}, alone {want}, from token {at} on")
        elif error is not None:
            if not ask.fails or len(have) != ask.fails - 1 or not isinstance(error.__cause__, Fault):
                self.problem(f"{ask}: failed after {len(have)} tokens with {error!r}")
        elif finish is None:
            if len(have) > len(want):
                self.problem(f"{ask}: {len(have)} tokens, alone {len(want)}")
        elif (have, finish) != (want, alone.finish[0]) or 0 < ask.fails <= len(have):
            self.problem(f"{ask}: got {have} {finish}, alone {want} {alone.finish[0]}")
        elif tokenizer is not None and outcome.text != alone.texts[0]:
            self.problem(f"{ask}: got {outcome.text!r}, alone {alone.texts[0]!r}")


def explained(model: Qwen3Moe, ask: Ask, tokens: list[int], at: int) -> bool:
    """Whether token `at` may follow those before it: logits that differ by rounding choose it."""
    ids = [*host_ids([int(one) for one in ask.prompt]).tolist(), *tokens[:at]]
    logits = model(torch.tensor([ids], device=model.device))[0, -1].float().cpu()
    options = ask.options
    sampling = Sampling(*(options.get(name, usual) for name, usual in USUAL.items()))
    generator = torch.Generator().manual_seed(options["seed"])
    u = torch.stack([torch.rand((), dtype=torch.float64, generator=generator) for _ in range(at + 1)])[-1]
    noise = torch.Generator().manual_seed(0)
    several = logits + ROUNDING[model.dtype] * torch.randn(512, len(logits), generator=noise)
    close = u + 1e-5 * torch.randn(512, dtype=torch.float64, generator=noise)
    return tokens[at] in choose(several, sampling, close.clamp(0, 1 - 1e-12)).tolist()


USUAL = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
