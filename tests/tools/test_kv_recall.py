"""The benchmark of long recalls: where its questions are, and the pieces of a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark_scripts import script
from ttnn_moe.models.qwen3.tiny.tokenizer import build


@pytest.mark.parametrize("shown", [0, 2])
def test_answers_follow_their_keys_and_early_questions_end_each_piece(shown: int) -> None:
    letters, piece, chunk = 5, 180, 64
    recall = script("kv_recall").Recall(Path(), "cpu", 1000, letters, 8, piece, chunk, (3.0,), ())
    ids, answers, pieces = recall.prompt(0, 2, 1.2, shown)
    width = letters + 4
    told = build().decode(ids.tolist()).split()
    assert len(told) == 1000 // width and sum(pieces) == len(ids)
    begins = [sum(pieces[:n]) // width for n in range(len(pieces)) if sum(pieces[:n]) <= answers[0]]
    first = begins[-1]
    assert answers.view(-1, 2).tolist() == [
        [n * width + letters + 1 + i for i in (0, 1)] for n in range(first, len(told))
    ]
    new = set(told[:first])
    assert len(new) == int(len(told) * 0.6), "every pair is told before the questions"
    assert set(told[first:]) <= new
    for a, b in zip(begins, begins[1:], strict=False):
        assert sum(pair in told[:at] for at, pair in enumerate(told[a:b], a)) == shown
        assert all(pair in told[a : b - shown] for pair in told[b - shown : b]), "about the pairs of their piece"
    assert max(pieces[len(begins) - 1 :]) <= chunk


def test_the_pairs_asked_most_are_anywhere() -> None:
    recall = script("kv_recall").Recall(Path(), "cpu", 1000, 5, 8, 180, 64, (3.0,), ())
    most = set()
    for row in range(4):
        ids, answers, _ = recall.prompt(row, 4, 3.0, 2)
        told = [tuple(pair) for pair in ids.view(-1, 9).tolist()]
        asked = told[int(answers[0]) // 9 :]
        most.add(told.index(max(asked, key=asked.count)))
    assert len(most) > 1, "the most asked pair is not always told at the same place"
