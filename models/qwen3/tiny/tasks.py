"""Synthetic tasks with exact answers, split into training and held-out examples.

A hash of an example's content (`split_of`) decides its side. So no example is on both sides, whatever seed made it.
The content of each task: the records of a recall; the string of a copy; the items of a sort, and the terms of a sum, in
any order; the wording and subject of a fact; the sentences of a story in any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from string import ascii_uppercase, digits

from . import english

TASKS = ("recall", "copy", "sort", "arithmetic", "sentences")
SPLITS = ("train", "heldout")
HELD_OUT_ONE_IN = 10
SHORTEST_CONTEXT, LONGEST_CONTEXT = 16, 1000
MOST_RECORDS = 600
"""Of a recall: there are 676 keys."""


@dataclass(frozen=True)
class Example:
    """One question with its one right answer.

    Attributes:
        task: one of TASKS.
        prompt: what the user says.
        answer: what the assistant must say, to the letter.
        key: the content that decides the side.
        follow_ups: further questions about the same prompt, with their answers (recall only).
    """

    task: str
    prompt: str
    answer: str
    key: str
    follow_ups: tuple[tuple[str, str], ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as a chat."""
        return [{"role": "user", "content": self.prompt}]


def split_of(key: str) -> str:
    """The side an example with this content is on: "train" or "heldout"."""
    digest = hashlib.sha256(key.encode()).digest()
    return SPLITS[int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0]


def recall(
    rng: Random,
    context: tuple[int, int] = (SHORTEST_CONTEXT, LONGEST_CONTEXT),
    questions: int = 1,
    hay_share: float = 0.25,
) -> Example:
    """The value of a key among many: "Remember: QX=40 ZP=17 What is ZP?". Some have sentences in between.

    Args:
        context: bytes of records and sentences, from and to; lengths are spread evenly over their logarithm.
        questions: how many different keys are asked for, if there are as many; all but the first are follow-ups.
        hay_share: how many recalls have sentences. After MOST_RECORDS records only sentences follow.
    """
    low, high = context
    length = round(low * (high / low) ** rng.random())
    hay = rng.random() < hay_share
    records: dict[str, str] = {}
    parts: list[str] = []
    while length > 0 or not records:
        if len(records) == MOST_RECORDS or (hay and records and rng.random() < 0.4):
            sentence = _train_sentence(rng)
            part = f"{sentence.text} {sentence.answer}"
        else:
            key = rng.choice(ascii_uppercase) + rng.choice(ascii_uppercase)
            if key in records:
                continue
            records[key] = f"{rng.randrange(100):02d}"
            part = f"{key}={records[key]}"
        parts.append(part)
        length -= len(part) + 1
    asked = rng.sample(tuple(records), min(questions, len(records)))
    turns = [(f"What is {key}?", records[key]) for key in asked]
    question, answer = turns[0]
    told = sorted(f"{key}={value}" for key, value in records.items())
    return Example("recall", f"Remember: {' '.join(parts)} {question}", answer, f"recall|{told}", tuple(turns[1:]))


def _train_sentence(rng: Random) -> english.Sentence:
    """A sentence that may be shown to the model in training: a held-out one must not leak through another task."""
    while True:
        sentence = english.sentence(rng)
        if split_of(f"sentences|{sentence.key}") == "train":
            return sentence


def copy(rng: Random) -> Example:
    """A string of 2 to 20 capital letters and digits, said again."""
    text = "".join(rng.choices(ascii_uppercase + digits, k=rng.randint(2, 20)))
    return Example("copy", f"Copy: {text}", text, f"copy|{text}")


def sort(rng: Random) -> Example:
    """3 to 10 different letters in alphabetical order, or 2 to 6 different two-digit numbers from small to large."""
    if rng.random() < 0.5:
        items, gap = rng.sample(ascii_uppercase, rng.randint(3, 10)), ""
    else:
        items, gap = [str(n) for n in rng.sample(range(10, 100), rng.randint(2, 6))], " "
    answer = gap.join(sorted(items))
    return Example("sort", f"Sort: {gap.join(items)}", answer, f"sort|{answer}")


def arithmetic(rng: Random) -> Example:
    """a+b or a-b of up to three digits each, or a chain of 3 or 4 digits; never below zero."""
    if rng.random() < 0.25:
        terms = [rng.randrange(10)]
        for _ in range(rng.randint(2, 3)):
            term = rng.randrange(10)
            terms.append(-term if rng.random() < 0.5 and sum(terms) >= term else term)
    else:
        a, b = (rng.randrange(10 ** rng.choice((1, 2, 3, 3))) for _ in range(2))
        terms = [a, b] if rng.random() < 0.5 else [max(a, b), -min(a, b)]
    signs = ["-" if term < 0 else "+" for term in terms]
    # minus zero is still written as a difference
    if len(terms) == 2 and terms[1] == 0:
        signs[1] = rng.choice("+-")
    shown = str(terms[0]) + "".join(s + str(abs(t)) for s, t in zip(signs[1:], terms[1:], strict=True))
    same = sorted(s + str(abs(t)) for s, t in zip(signs, terms, strict=True))
    return Example("arithmetic", f"What is {shown}?", str(sum(terms)), f"arithmetic|{same}")


def sentences(rng: Random) -> Example:
    """The end of a sentence that facts, grammar or the text before it determine."""
    sentence = english.sentence(rng)
    return Example("sentences", f"Complete: {sentence.text}", sentence.answer, f"sentences|{sentence.key}")


MAKERS: dict[str, Callable[..., Example]] = {
    "recall": recall,
    "copy": copy,
    "sort": sort,
    "arithmetic": arithmetic,
    "sentences": sentences,
}


def stream(task: str, split: str, seed: int | str, **options: object) -> Iterator[Example]:
    """Examples of one task and side without end, the same for the same arguments.

    Args:
        task: one of TASKS.
        split: "train" or "heldout".
        seed: which sequence.
        options: for the task's maker; recall takes `context` and `questions`.

    Raises:
        ValueError: an unknown task or split.
    """
    if task not in TASKS or split not in SPLITS:
        raise ValueError(f"got task {task!r}, split {split!r}; expected one of {TASKS} and one of {SPLITS}")
    rng = Random(f"{task}/{split}/{seed}")
    while True:
        example = MAKERS[task](rng, **options)
        if split_of(example.key) == split:
            yield example


def examples(task: str, split: str, n: int, seed: int | str = 0, **options: object) -> list[Example]:
    """The first n different examples of `stream` (as many as there are, when a task runs out of them)."""
    found: dict[tuple[str, str], Example] = {}
    for tried, example in enumerate(stream(task, split, seed, **options)):
        if len(found) >= n or tried >= 100 * n:
            break
        found.setdefault((example.key, example.prompt), example)
    return list(found.values())
