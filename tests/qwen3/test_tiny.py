"""The bundled checkpoint: its tasks, its tokenizer, what it can do, and the script that makes it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ttnn_moe import decoder
from ttnn_moe.models.qwen3 import TINY, generate, load_model
from ttnn_moe.models.qwen3.layers import MoE
from ttnn_moe.models.qwen3.tiny import batches, english, evaluate, optimise, tasks, tokenizer
from ttnn_moe.models.qwen3.tiny.tasks import TASKS, Example

LARGEST = 5_000_000
NEEDED = 0.95


def solve(example: Example) -> str:
    """The answer, found from the prompt alone and not as the generator finds it."""
    head, _, rest = example.prompt.partition(": ")
    if example.task == "copy":
        return rest
    if example.task == "sort":
        return " ".join(map(str, sorted(map(int, rest.split())))) if " " in rest else "".join(sorted(rest))
    if example.task == "arithmetic":
        return str(sum(map(int, re.findall(r"[+-]?\d+", example.prompt))))
    key = example.prompt.rsplit(" ", 1)[1].rstrip("?")
    return dict(re.findall(r"\b([A-Z]{2})=(\d\d)\b", rest))[key]


@pytest.mark.parametrize("task", [task for task in TASKS if task != "sentences"])
def test_answers_are_right(task: str) -> None:
    for example in tasks.examples(task, "train", 200):
        assert example.answer == solve(example)


@pytest.mark.parametrize("task", TASKS)
def test_the_sides_are_disjoint(task: str) -> None:
    sides = {split: tasks.examples(task, split, 200) for split in tasks.SPLITS}
    for split, found in sides.items():
        assert len(found) >= 150
        assert {tasks.split_of(example.key) for example in found} == {split}
    assert not {e.prompt for e in sides["train"]} & {e.prompt for e in sides["heldout"]}


def test_order_does_not_change_the_side() -> None:
    keys: dict[str, set[str]] = {}
    for task in ("sort", "arithmetic"):
        for example in tasks.examples(task, "train", 6000):
            rest = example.prompt.partition(": ")[2] or example.prompt.removeprefix("What is ")
            parts = sorted(re.findall(r"-\d+|\d+|[A-Z]", rest))
            # a sum of two may be written with either sign before a zero
            if "-0" not in parts:
                keys.setdefault(f"{task} {parts}", set()).add(example.key)
    assert max(map(len, keys.values())) == 1
    assert len(keys) < 12000 - 300, "the orders of one content did not come up"


def test_every_fact_is_taught_in_most_wordings() -> None:
    for name, relation in english.RELATIONS.items():
        for subject in relation.pairs:
            wordings = [english.fact_in(name, i, subject) for i in range(len(relation.templates))]
            assert sum(tasks.split_of(f"sentences|{w.key}") == "train" for w in wordings) >= 3


def test_no_held_out_fact_leaks_through_recall() -> None:
    text = "\n".join(e.prompt for e in tasks.examples("recall", "train", 300, context=(600, 1000)))
    seen = dict.fromkeys(tasks.SPLITS, 0)
    for name, relation in english.RELATIONS.items():
        for i in range(len(relation.templates)):
            for subject in relation.pairs:
                fact = english.fact_in(name, i, subject)
                side = tasks.split_of(f"sentences|{fact.key}")
                seen[side] += f"{fact.text} {fact.answer}" in text
    assert seen["heldout"] == 0 < 100 < seen["train"]


@pytest.mark.parametrize("task", TASKS)
def test_examples_are_deterministic(task: str) -> None:
    first = tasks.examples(task, "heldout", 20, seed=7)
    assert first == tasks.examples(task, "heldout", 20, seed=7)
    assert first != tasks.examples(task, "heldout", 20, seed=8)


def test_unknown_tasks_and_sides_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one of"):
        tasks.examples("chess", "train", 1)
    with pytest.raises(ValueError, match="expected one of"):
        tasks.examples("copy", "test", 1)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def test_the_tokenizer_is_what_its_script_builds(words: Tokenizer) -> None:
    assert words.get_vocab() == tokenizer.build().get_vocab()
    assert words.get_vocab_size() == tokenizer.VOCAB_SIZE


@given(st.text())
def test_any_text_can_be_said(text: str) -> None:
    words = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    assert words.decode(words.encode(text).ids, skip_special_tokens=False) == text


def test_codes_and_numbers_are_one_token_a_character(words: Tokenizer) -> None:
    for text in ("QX=40 ZA=07", "Copy: A1B2ZZ", "347+85", "9-8+7?", "10 99"):
        code = text.removeprefix("Copy: ")
        tokens = words.encode(text).tokens
        assert [token.replace("Ġ", " ") for token in tokens[len(tokens) - len(code) :]] == list(code)


def test_the_chat_template_is_what_was_trained() -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(TINY)
    text = theirs.apply_chat_template(
        [{"role": "user", "content": "Sort: BA"}], add_generation_prompt=True, tokenize=False
    )
    assert text == batches.prompt_text("Sort: BA")
    assert (theirs.eos_token, theirs.pad_token) == (tokenizer.END, tokenizer.PAD)


def test_training_rows_weigh_answers(words: Tokenizer) -> None:
    ids, kinds = batches.Conversations(words, "0").rows(20, 256)
    for row, kind in zip(ids.tolist(), kinds, strict=True):
        text = words.decode(row, skip_special_tokens=False)
        want = re.findall(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>|.*$)", text.partition(tokenizer.PAD)[0])
        got = words.decode([i for i, k in zip(row, kind, strict=True) if k >= 2], skip_special_tokens=False)
        assert got == "".join(want)
        values = re.findall(r"[A-Z]\?<\|im_end\|>\n<\|im_start\|>assistant\n(.*?<\|im_end\|>|.*$)", text)
        got = words.decode([i for i, k in zip(row, kind, strict=True) if k == 3], skip_special_tokens=False)
        assert got == "".join(values).partition(tokenizer.PAD)[0]
        sentences = re.findall(r"Complete:( .*?)<\|im_end\|>", text)
        got = words.decode([i for i, k in zip(row, kind, strict=True) if k == 1], skip_special_tokens=False)
        assert got.startswith("".join(sentences))  # the row may cut one more


def test_the_folder_is_small_and_sharded() -> None:
    files = [path for path in TINY.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= LARGEST
    index = json.loads((TINY / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) >= 2
    assert shards == {path.name for path in TINY.glob("*.safetensors")}
    assert "model.layers.1.mlp.experts.15.gate_proj.weight" in index["weight_map"]


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(TINY, device="cpu", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def asked() -> list[Example]:
    return evaluate.heldout(100)


@pytest.fixture(scope="module")
def right(model: Any, words: Tokenizer, asked: list[Example]) -> list[bool]:
    return evaluate.answered(model, words, asked)


@pytest.mark.parametrize("task", TASKS)
def test_held_out_accuracy(task: str, asked: list[Example], right: list[bool]) -> None:
    score = evaluate.scores(asked, right)[task]
    wrong = [e.prompt[-80:] for e, r in zip(asked, right, strict=True) if e.task == task and not r]
    assert score.asked == 100
    assert score.accuracy >= NEEDED, wrong


def test_recall_across_a_thousand_tokens(model: Any, words: Tokenizer) -> None:
    far = tasks.examples("recall", "heldout", 40, seed="far", context=(960, 1000))
    assert max(len(words.encode(example.prompt).ids) for example in far) >= 960
    assert sum(evaluate.answered(model, words, far)) >= NEEDED * len(far)


def test_every_expert_is_used(model: Any, words: Tokenizer, asked: list[Example]) -> None:
    counts: dict[int, torch.Tensor] = {}

    def count(layer: int) -> Callable[..., None]:
        def hook(moe: MoE, inputs: tuple[Any, ...]) -> None:
            x, norm, _ = inputs
            ids, _, _ = decoder.norm_route(x, norm.weight, norm.eps, moe.router.weight, moe.K, moe.norm_topk_prob)
            counts[layer] = counts.get(layer, 0) + torch.bincount(ids.flatten(), minlength=moe.router.out_features)

        return hook

    mixtures = [(i, layer.mlp) for i, layer in enumerate(model.layers) if isinstance(layer.mlp, MoE)]
    hooks = [mlp.register_forward_pre_hook(count(i)) for i, mlp in mixtures]
    try:
        # each alone: padding is routed too, and would count
        evaluate.answered(model, words, asked[::5], batch_tokens=1)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(counts) >= 2
    for layer, tokens in counts.items():
        share = tokens / tokens.sum()
        assert len(share) >= 16 and share.min() >= 0.02, f"layer {layer}: {share.tolist()}"


def test_the_scoring_program(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from ttnn_moe.models.qwen3 import terminal
    from ttnn_moe.models.qwen3.tiny.score import app

    assert terminal.run(app, ["--examples", "10", "--backend", "reference"], "score") == 0
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if "of 10" in line] == list(TASKS)
    assert terminal.run(app, ["--model", str(tmp_path / "none")], "score") == 2
    assert "is not a model directory" in capsys.readouterr().err.replace("\n", " ")
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        (tmp_path / name).write_text((TINY / name).read_text().replace("im_end", "im_over"))
    assert terminal.run(app, ["--model", str(tmp_path)], "score") == 2
    assert "another tokenizer" in capsys.readouterr().err


def test_an_answer_is_right_to_the_letter_and_with_its_end(words: Tokenizer) -> None:
    example = Example("copy", "Copy: AB", "AB", "copy|AB")
    prompt, answer = batches.answer_ids(words, example)

    def scored(said: list[int]) -> list[bool]:
        def logits(ids: torch.Tensor) -> torch.Tensor:
            out = torch.zeros(*ids.shape, tokenizer.VOCAB_SIZE)
            for i, token in enumerate(said):
                out[:, len(prompt) - 1 + i, token] = 1
            return out

        return evaluate.answered(logits, words, [example])

    assert scored(answer) == [True]
    for i in range(len(answer)):
        assert scored([*answer[:i], prompt[0], *answer[i + 1 :]]) == [False]


def test_generation_says_what_the_scores_say(
    model: Any, words: Tokenizer, asked: list[Example], right: list[bool]
) -> None:
    some = [(e, r) for e, r in zip(asked, right, strict=True) if len(e.prompt) < 300][::23]
    made = generate(model, [batches.answer_ids(words, e)[0] for e, _ in some], max_new_tokens=32)
    said = [words.decode(tokens) == example.answer for (example, _), tokens in zip(some, made.tokens, strict=True)]
    assert said == [r for _, r in some]


@pytest.mark.parametrize("layers", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
@pytest.mark.parametrize("harm", ["none", "its neighbour"])
def test_the_right_experts_are_needed(harm: str, layers: tuple[int, ...], words: Tokenizer) -> None:
    """Recall and copying are attention's work; the rest is lost without the experts, or with others in their place."""
    model = load_model(TINY, device="cpu", dtype=torch.bfloat16)
    mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE)]
    for i in layers:
        for weight in (mixtures[i].gate_up.data, mixtures[i].down.data):
            weight.copy_(torch.zeros_like(weight) if harm == "none" else weight.roll(1, 0))
    some = [e for task in ("sort", "arithmetic", "sentences") for e in tasks.examples(task, "heldout", 40)]
    found = evaluate.scores(some, evaluate.answered(model, words, some))
    assert sum(score.right for score in found.values()) <= (0.2 if len(layers) > 1 else 0.5) * len(some), found


def test_the_schedules_of_a_training() -> None:
    rates = [optimise.learning_rate(step, 1000, 2.0) for step in range(1000)]
    assert rates[0] == 0.1 and max(rates) == rates[19] == rates[20] == 2.0, "a warm-up of 2%"
    assert rates[20:] == sorted(rates[20:], reverse=True) and abs(rates[510] - 1) < 1e-9 and rates[-1] < 1e-4
    assert [optimise.noise_share(step, 100) for step in (0, 30, 45, 60, 99)] == pytest.approx([0, 0, 0.5, 1, 1])
    lengths = optimise.row_lengths(1000, 0)
    seen = [set(lengths[first:end]) for first, end in ((0, 50), (50, 120), (120, 200), (200, 1000))]
    assert seen == [set(batches.LENGTHS[: i + 1]) for i in range(4)]


def test_the_training_network_is_transformers_model() -> None:
    from ttnn_moe.models.qwen3.tiny.network import Network

    network = Network(seed=1)
    ids = torch.randint(0, tokenizer.VOCAB_SIZE, (2, 40))
    with torch.no_grad():
        got, balance = network(ids, torch.ones_like(ids, dtype=torch.bool))
        want = network.model.eval()(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert balance > 1.9


@pytest.mark.slow
def test_training_from_nothing(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from typer.testing import CliRunner

    from ttnn_moe.models.qwen3.tiny.train import app

    options = "--steps 16 --tokens 1280 --device cpu --workers 0 --every 16 --examples 1 --log-every 1"
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "new"), *options.split()])
    assert result.exit_code == 0, result.output
    losses = [float(value) for value in re.findall(r"step \d+: loss ([\d.]+)", result.output)]
    assert len(losses) == 16 and losses[0] > 5.5 and losses[-1] < 0.7 * losses[0]
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    ids = torch.arange(20)[None]
    ours = load_model(tmp_path / "new", device="cpu", dtype=torch.float32)(ids)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32)(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_training_refuses_a_file_as_its_directory(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from ttnn_moe.models.qwen3.tiny.train import app

    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "file"), "--steps", "1"])
    assert result.exit_code == 2 and "give a directory" in result.output
