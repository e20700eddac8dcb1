"""Scores of a model on the tiny model's tasks. Any function may compute the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .batches import answer_ids
from .tasks import TASKS, Example, examples
from .tokenizer import PAD

Logits = Callable[[Tensor], Tensor]
"""ids [B, S] int64 -> logits [B, S, vocab_size]: causal, so that padding at the end does not matter."""


class Score(NamedTuple):
    right: int
    asked: int

    @property
    def accuracy(self) -> float:
        return self.right / max(1, self.asked)


def heldout(per_task: int, seed: int | str = 0) -> list[Example]:
    """Held-out examples of every task."""
    return [example for task in TASKS for example in examples(task, "heldout", per_task, seed)]


def answered(
    logits: Logits,
    tokenizer: Tokenizer,
    asked: Sequence[Example],
    device: torch.device | str = "cpu",
    batch_tokens: int = 16384,
) -> list[bool]:
    """Whether greedy decoding gives each example's answer to the letter and then stops.

    One forward pass a batch decides it. Greedy decoding gives an answer exactly when each of its tokens, and the end
    marker, is the most probable one after those before it.

    Args:
        logits: the model.
        tokenizer: the checkpoint's.
        asked: examples, in any order.
        device: where ids are put.
        batch_tokens: tokens of a batch, padding included.
    """
    pairs = [answer_ids(tokenizer, example) for example in asked]
    # the last token of an answer is never an input
    lengths = [len(prompt) + len(answer) - 1 for prompt, answer in pairs]
    pad = tokenizer.get_vocab()[PAD]
    right = [False] * len(asked)
    for batch in _batches(lengths, batch_tokens):
        longest = max(lengths[i] for i in batch)
        ids = torch.full((len(batch), longest), pad, dtype=torch.int64)
        for row, i in enumerate(batch):
            prompt, answer = pairs[i]
            ids[row, : lengths[i]] = torch.tensor(prompt + answer[:-1])
        with torch.no_grad():
            best = logits(ids.to(device)).argmax(-1).cpu()
        for row, i in enumerate(batch):
            prompt, answer = pairs[i]
            right[i] = best[row, len(prompt) - 1 : lengths[i]].tolist() == answer
    return right


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterable[list[int]]:
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[i] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def scores(asked: Sequence[Example], right: Sequence[bool]) -> dict[str, Score]:
    """Right answers by task."""
    return {
        task: Score(sum(r for _, r in rows), len(rows))
        for task in TASKS
        if (rows := [(e, r) for e, r in zip(asked, right, strict=True) if e.task == task])
    }
