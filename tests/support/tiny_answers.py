"""Whether a conversion of the bundled checkpoint still answers its tasks."""

from __future__ import annotations

from pathlib import Path

from ttnn_moe.models.qwen3 import Qwen3Moe, Tokenizer, generate
from ttnn_moe.models.qwen3.tiny import batches, evaluate
from ttnn_moe.models.qwen3.tiny.tasks import TASKS


def check_every_task(model: Qwen3Moe, directory: Path, needed: float) -> None:
    """30 held-out prompts of each task, at least `needed` of them right; and some of them generated."""
    words, asked = Tokenizer.from_directory(directory).fast, evaluate.heldout(30)
    right = evaluate.answered(model, words, asked)
    found = evaluate.scores(asked, right)
    assert set(found) == set(TASKS)
    assert all(score.asked == 30 and score.accuracy >= needed for score in found.values()), found
    some = [(e, r) for e, r in zip(asked, right, strict=True) if len(e.prompt) < 200][::30]
    made = generate(model, [batches.answer_ids(words, e)[0] for e, _ in some], max_new_tokens=32)
    said = [words.decode(tokens) == example.answer for (example, _), tokens in zip(some, made.tokens, strict=True)]
    assert len(some) >= 3 and said == [r for _, r in some]
