"""Requests of the soak: good ones, ones that no engine may take, and ones whose text fails on the way."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import torch

from ttnn_moe.models.qwen3 import Tokenizer
from ttnn_moe.models.qwen3.tokenizer import TextStream

Kind = Literal["good", "bad", "large"]
NAN, HUGE = float("nan"), 10**400


class Fault(Exception):
    """Planted by the soak."""


@dataclass(frozen=True)
class Ask:
    """What a client asks.

    Attributes:
        prompt, options: of Engine.add.
        kind: "bad": the engine must refuse it; "large": it must, and the options are right.
        fails: the piece of text, from 1 on, that cannot be made; 0: none.
    """

    prompt: Any
    options: dict[str, Any]
    kind: Kind = "good"
    fails: int = 0


BAD_OPTIONS: dict[str, list[Any]] = {
    "max_new_tokens": [2.0, NAN, True, "2", None, HUGE, 0, -1, Fraction(2), torch.ones(1).int(), [3]],
    "temperature": [NAN, float("inf"), HUGE, -1, -1e-300, "1", None, 1j, True, torch.ones(2)],
    "top_k": [2.0, True, NAN, HUGE, -1, "4", None, np.bool_(1)],
    "top_p": [0, NAN, 1.01, HUGE, True, "0.5", None],
    "seed": [-1, 2**63, 1.0, True, "1", [1, 2], [], NAN],
    "stop_ids": [5, "5", [-1], [5.0], [True], [512], torch.ones(2), {1: 2}, range(10**12)],
}
BAD_IDS: list[Any] = [512, -1, 2**63, 1.0, True, None, [1], NAN, "1"]
BAD_PROMPTS: list[Any] = [*([one] for one in BAD_IDS), [], "12", torch.ones(3), {1, 2}, {1: 2}, None, 5, range(10**30)]


def draw(rng: random.Random, vocabulary: int, longest: int) -> Ask:
    """A request of a random kind.

    Args:
        longest: tokens that a row of the engine holds.
    """
    new = rng.choice([1, 2, rng.randint(1, 12)])
    n = rng.randint(1, max(1, min(50, longest - new)))
    prompt = [rng.randrange(vocabulary) for _ in range(n)]
    options: dict[str, Any] = {"max_new_tokens": new, "seed": rng.randrange(2**63)}
    if rng.random() < 0.5:
        options["temperature"] = rng.choice([0.7, 1.5, 1e-40, 1e30, Fraction(3, 2), np.float32(0.9)])
        options["top_p"] = rng.choice([1.0, 0.9, 1e-9])
        options["top_k"] = rng.choice([0, 1, 40, np.int64(7)])
    stops = rng.sample(range(vocabulary), 30)
    options["stop_ids"] = rng.choice([(), stops, torch.tensor(stops), set(stops), np.array(stops)])
    sort = rng.random()
    if sort < 0.12:
        if rng.random() < 0.3:
            return Ask(rng.choice(BAD_PROMPTS), options, "bad")
        name = rng.choice(list(BAD_OPTIONS))
        return Ask(prompt, {**options, name: rng.choice(BAD_OPTIONS[name])}, "bad")
    if sort < 0.16:
        return Ask(prompt * longest, options, "large")
    kinds = (list, tuple, torch.tensor, np.array)
    return Ask(rng.choice(kinds)(prompt), options, fails=rng.randint(1, 6) if sort < 0.22 else 0)


class FaultyStream(TextStream):
    """Text whose n-th piece cannot be made."""

    def __init__(self, tokenizer: Tokenizer, n: int):
        super().__init__(tokenizer)
        self._left = n

    def push(self, token: int) -> str:
        self._left -= 1
        if self._left == 0:
            raise Fault("no text")
        return super().push(token)


class FaultyTokenizer:
    """The bundled tokenizer; a thread says with `fails` whether the text of its next request fails."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._plan = tokenizer, threading.local()
        self.eos_token_id = tokenizer.eos_token_id

    def plan(self, fails: int) -> None:
        self._plan.fails = fails

    def stream(self) -> TextStream:
        fails = getattr(self._plan, "fails", 0)
        return FaultyStream(self._tokenizer, fails) if fails else self._tokenizer.stream()
