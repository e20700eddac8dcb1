"""Training batches: conversations of several turns as rows of tokens, with the weight of each token in the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from string import ascii_uppercase

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from .tasks import Example, stream
from .tokenizer import END, PAD, START, SYSTEM

# rows of a step may be this long; recall contexts grow with them
LENGTHS = (128, 256, 512, 1280)
# shares of the turns that are no recall: sums are hardest, and their answers are shortest
SHARES = {"copy": 0.1, "sort": 0.2, "arithmetic": 0.3, "sentences": 0.4}
# loss weights by kind of token: none, text of a sentence, answer, value of a key (few tokens, and the slowest to learn)
WEIGHTS = (0.0, 0.02, 1.0, 3.0)
SYSTEM_SHARE = 0.1
# bytes that a row's recall leaves for questions about it, beside an eighth of the row
TURN_BYTES = 40


def prompt_text(prompt: str) -> str:
    """One user turn and the opening of the answer, as the chat template writes them."""
    return f"{START}user\n{prompt}{END}\n{START}assistant\n"


def answer_ids(tokenizer: Tokenizer, example: Example) -> tuple[list[int], list[int]]:
    """Tokens of the prompt (one chat turn) and of the answer with its end marker."""
    prompt = tokenizer.encode(prompt_text(example.prompt), add_special_tokens=False).ids
    return prompt, tokenizer.encode(example.answer + END, add_special_tokens=False).ids


class Conversations:
    """Endless training rows; each is the same for the same seed."""

    def __init__(self, tokenizer: Tokenizer, seed: str):
        self.tokenizer, self.rng = tokenizer, Random(f"rows/{seed}")
        self.sources: dict[str, Iterator[Example]] = {task: stream(task, "train", seed) for task in SHARES}
        self.seed = seed
        self.markers = [tokenizer.token_to_id(token) for token in (START, "assistant", END, PAD)]
        self.question = tokenizer.token_to_id("?")
        self.letters = {tokenizer.token_to_id(letter) for letter in ascii_uppercase}
        self.sentence_ids = set(tokenizer.encode("Complete:").ids[:1])

    def _other(self) -> tuple[str, str]:
        task = self.rng.choices(tuple(SHARES), tuple(SHARES.values()))[0]
        example = next(self.sources[task])
        return example.prompt, example.answer

    def turns(self, length: int) -> Iterator[tuple[str, str]]:
        """Turns that fill `length` tokens: questions about one recall among turns of the other tasks."""
        rng = self.rng
        questions: list[tuple[str, str]] = []
        # half of the rows begin with another task, so that each is also learnt as the first turn
        if length > LENGTHS[0] or rng.random() < 0.5:
            size = int(rng.uniform(0.3, 1) * (length - length // 8 - TURN_BYTES))
            recall = stream("recall", "train", f"{self.seed}/{rng.random()}", context=(size, size), questions=64)
            example = next(recall)
            questions = list(reversed(example.follow_ups))
            yield example.prompt, example.answer
        while True:
            yield questions.pop() if questions and rng.random() < 0.6 else self._other()

    def row(self, length: int) -> str:
        """Text of a little more than `length` tokens."""
        system = self.rng.random() < SYSTEM_SHARE
        text = [f"{START}system\n{SYSTEM}{END}\n"] if system else []
        tokens = 0
        for prompt, answer in self.turns(length):
            text.append(f"{prompt_text(prompt)}{answer}{END}\n")
            # at least: a token is a few letters in a sentence
            tokens += len(prompt) // 3 if prompt.startswith("Complete:") else len(prompt) - 8
            tokens += 7
            if tokens >= length:
                return "".join(text)
        raise AssertionError("turns() has no end")

    def rows(self, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """ids [count, length] int16 and their kinds [count, length] uint8, which WEIGHTS weighs.

        Each token has a kind: 3 for the value of a key, 2 for any other answer (both with their end marker), 1 for the
        text of a sentence, 0 for all else. A turn cut by the row's end keeps what fits.
        """
        start, assistant, end, pad = self.markers
        ids = np.full((count, length), pad, dtype=np.int16)
        kinds = np.zeros((count, length), dtype=np.uint8)
        texts = [self.row(length) for _ in range(count)]
        for r, encoding in enumerate(self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)):
            row = np.asarray(encoding.ids[:length], dtype=np.int16)
            ids[r, : len(row)] = row
            opens = np.flatnonzero(row == start)
            for begin, stop in zip(opens, [*opens[1:], len(row)], strict=True):
                if begin + 3 >= stop:
                    continue
                if row[begin + 1] == assistant:
                    # before it: the prompt's last letter, a question mark, the end marker, a line end
                    asks_key = row[begin - 3] == self.question and int(row[begin - 4]) in self.letters
                    kinds[r, begin + 3 : stop] = 3 if asks_key else 2
                    # the line end after the end marker is the template's, not the model's
                    if row[stop - 1] != end and (row[begin + 3 : stop] == end).any():
                        kinds[r, stop - 1] = 0
                elif int(row[begin + 3]) in self.sentence_ids:
                    kinds[r, begin + 5 : stop - 2] = 1
        return ids, kinds


def token_weights(kinds: Tensor) -> Tensor:
    """The loss weight of each token from its kind."""
    weights = torch.zeros(kinds.shape, device=kinds.device)
    for kind, weight in enumerate(WEIGHTS):
        weights = weights + weight * (kinds == kind)
    return weights


class Steps(Dataset[tuple[Tensor, Tensor]]):
    """Batches by step number, so that workers may make them in any order: ids [B, S] int16, kinds [B, S] uint8."""

    def __init__(self, tokenizer_json: str, lengths: Sequence[int], tokens: int, seed: int):
        self.tokenizer_json, self.lengths, self.tokens, self.seed = tokenizer_json, lengths, tokens, seed
        self.tokenizer: Tokenizer | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        if self.tokenizer is None:
            self.tokenizer = Tokenizer.from_str(self.tokenizer_json)
        length = self.lengths[step]
        rows = Conversations(self.tokenizer, f"{self.seed}/{step}").rows(self.tokens // length, length)
        return torch.from_numpy(rows[0]), torch.from_numpy(rows[1])
