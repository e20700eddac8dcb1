"""The model against transformers' Qwen3MoeForCausalLM, from the same files."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import qwen3_last_layer
from qwen3_checkpoints import CONFIGS, HAS_TINY, TINY, make, prompts, reference, reference_logits, relative_error
from ttnn_moe.kv.cache import CacheSizes
from ttnn_moe.kv.paged import PagedCache
from ttnn_moe.kv.step import DecodeStep, PrefillStep
from ttnn_moe.models.qwen3 import Engine, Tokenizer, generate, load_model
from ttnn_moe.models.qwen3.tiny import tasks

LENGTHS = [1, 17, 5, 40, 2]
FP32 = 1e-4


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a GPU is, which "auto" would choose; tests/support/qwen3_*_cases.py run there."""
    monkeypatch.setenv("TTNN_MOE_BACKEND", "reference")


@pytest.fixture(params=list(CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make(tmp_path / request.param, **CONFIGS[request.param])


def check_fp32(directory: Path) -> None:
    """Whole sequences, then a ragged batch through the cache: packed prefill and decode steps."""
    ours, theirs = load_model(directory, dtype=torch.float32), reference(directory)
    vocab = ours.config.vocab_size
    whole = prompts([33, 33], vocab)
    expected = torch.stack([reference_logits(theirs, ids) for ids in whole])
    assert relative_error(ours(torch.tensor(whole)), expected) <= FP32

    texts = prompts([n + 6 for n in LENGTHS], vocab)  # prompts and six forced tokens each
    expected = [reference_logits(theirs, ids) for ids in texts]
    cache = qwen3_last_layer.opened(ours, len(LENGTHS), max(LENGTHS) + 6)
    ids = [token for text, n in zip(texts, LENGTHS, strict=True) for token in text[:n]]
    step = cache.prefill(list(enumerate(LENGTHS)), range(len(ids)))
    got = ours(torch.tensor(ids), cache, step)
    for logits, want, n in zip(got.split(LENGTHS), expected, LENGTHS, strict=True):
        assert relative_error(logits, want[:n]) <= FP32
    for i in range(6):
        ids = [text[n + i] for text, n in zip(texts, LENGTHS, strict=True)]
        got = ours(torch.tensor(ids), cache, cache.decode(range(len(LENGTHS)), [n + i for n in LENGTHS]))
        want = torch.stack([logits[n + i] for logits, n in zip(expected, LENGTHS, strict=True)])
        assert relative_error(got, want) <= FP32


def check_bf16_greedy(directory: Path, texts: list[list[int]], new: int = 64) -> None:
    """Greedy tokens equal transformers', except where its own best logits are closer than bf16 can tell.

    The reference reads our tokens (teacher forcing). What bf16 can tell is measured, not assumed: the largest
    distance, over all logits of those steps, between the reference in bf16 and in fp32. Two logits that both move
    by it can change places when their gap is at most twice that. So that this excuses nothing else, nine tokens in
    ten must agree all the same, and our bf16 logits must be about as near to the fp32 ones as the reference's.
    """
    ours = load_model(directory, dtype=torch.bfloat16)
    made = generate(ours, texts, max_new_tokens=new, stop_ids=()).tokens
    bf16, fp32 = reference(directory, torch.bfloat16), reference(directory, torch.float32)
    agreed, own_error, their_error = 0, 0.0, 0.0
    for text, tokens in zip(texts, made, strict=True):
        assert len(tokens) == new
        steps = slice(len(text) - 1, -1)
        low = reference_logits(bf16, text + tokens)[steps].float()
        high = reference_logits(fp32, text + tokens)[steps]
        own = ours(torch.tensor([text + tokens]))[0, steps].float()
        own_error += float((own - high).square().sum() / high.square().sum())
        their_error += float((low - high).square().sum() / high.square().sum())
        bound = 2 * float((low - high).abs().max())
        for i, token in enumerate(tokens):
            best, second = low[i].topk(2).values.tolist()
            if low[i, token] == best:
                agreed += 1
                continue
            assert best - second <= bound and best - low[i, token] <= bound, (
                f"token {i}: the reference's own gap is {best - second}, its bf16 error {bound / 2}"
            )
    assert agreed >= 0.9 * new * len(texts)
    assert own_error <= 1.5**2 * their_error


def test_fp32_logits(checkpoint: Path) -> None:
    check_fp32(checkpoint)


@pytest.mark.parametrize("name", ["untied", "dense-layer", "no-norm-topk", "every-expert"])
def test_bf16_greedy_tokens(name: str, tmp_path: Path) -> None:
    directory = make(tmp_path, torch.bfloat16, router_scale=8, **CONFIGS[name])
    check_bf16_greedy(directory, prompts([7, 30, 1, 12, 50, 3, 21, 8]))


@pytest.mark.skipif(not HAS_TINY, reason="the bundled checkpoint is not built")
class TestBundled:
    def test_fp32_logits(self) -> None:
        check_fp32(TINY)

    def test_bf16_greedy_tokens(self) -> None:
        tokenizer = Tokenizer.from_directory(TINY)
        chats = [
            tokenizer.apply_chat_template(example.messages, add_generation_prompt=True)
            for task in tasks.TASKS
            for example in tasks.examples(task, "heldout", 2)
        ]
        check_bf16_greedy(TINY, [tokenizer.encode(chat, add_special_tokens=False) for chat in chats])


def test_autocast_changes_no_bit(checkpoint: Path) -> None:
    """Neither of a whole forward pass nor of a generation: its steps, and what they draw."""
    model = load_model(checkpoint, backend="reference", device="cpu", dtype=torch.float32)
    seen: list[torch.Tensor] = []
    model.register_forward_hook(lambda module, args, logits: seen.append(logits))
    runs = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            seen.clear()
            model(torch.tensor(prompts([9])))
            made = generate(model, prompts([5, 2]), max_new_tokens=4, stop_ids=(), temperature=0.9, seed=3).tokens
        runs.append((made, list(seen)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(*pair) for pair in zip(runs[0][1], runs[1][1], strict=True))


def test_a_ragged_batch_is_what_each_prompt_is_alone(tmp_path: Path) -> None:
    model = load_model(make(tmp_path))
    texts = prompts(LENGTHS)
    together = generate(model, texts, max_new_tokens=12, stop_ids=())
    for text, tokens in zip(texts, together.tokens, strict=True):
        assert generate(model, [text], max_new_tokens=12, stop_ids=()).tokens[0] == tokens


@pytest.mark.parametrize("chunk", [1, 3, 16, 29, 1000])
def test_chunked_prefill_is_whole_prefill(chunk: int, tmp_path: Path) -> None:
    model = load_model(make(tmp_path))
    texts = prompts(LENGTHS)
    expected = [model(torch.tensor([text]))[0, -1] for text in texts]
    engine = Engine(model, len(texts), max(LENGTHS) + 1)
    seen: list[torch.Tensor] = []
    model.register_forward_hook(lambda model, args, logits: seen.append(logits))
    got = generate(model, texts, max_new_tokens=1, stop_ids=(), engine=engine, prefill_chunk=chunk)
    assert got.tokens == [[int(logits.argmax())] for logits in expected]
    assert relative_error(torch.cat(seen), torch.stack(expected)) <= 1e-5
    assert len(seen) == -(-sum(LENGTHS) // chunk) and engine.cache.lengths[: len(texts)] == LENGTHS


@pytest.mark.parametrize("page", [16, 64])
def test_the_last_layer_runs_only_for_tokens_whose_logits_are_wanted(page: int, checkpoint: Path) -> None:
    model = load_model(checkpoint, dtype=torch.float32)
    for seed in range(4):
        for wanted in (qwen3_last_layer.ends, qwen3_last_layer.any_tokens):
            qwen3_last_layer.check(model, model, qwen3_last_layer.cache_of(model, page), seed, wanted)


def test_an_only_layer_is_the_last(tmp_path: Path) -> None:
    model = load_model(make(tmp_path, num_hidden_layers=1), dtype=torch.float32)
    qwen3_last_layer.check(model, model, qwen3_last_layer.cache_of(model), 0)


def test_steps_that_want_all_logits_or_none_in_particular_run_whole() -> None:
    one, two = torch.tensor([1]), torch.arange(2)
    assert PrefillStep(two, two, 2, logits_at=None, spans=()).wanted() is None
    assert PrefillStep(two, two, 2, logits_at=two, spans=()).wanted() is None
    bounded = PrefillStep(two, two, 2, logits_at=torch.zeros(3, dtype=torch.int64), spans=(), num_wanted=one)
    assert bounded.wanted() is None
    wanted = PrefillStep(two, two + 5, 7, logits_at=one, spans=()).wanted()
    assert wanted is not None and wanted.bound == 7 and wanted.num_tokens is None
    assert not wanted.past_written, "the step has written what lies before these tokens"
    assert (wanted.rows.tolist(), wanted.positions.tolist()) == ([1], [6])
    wanted = PrefillStep(two, two + 5, 7, logits_at=one, spans=(), num_wanted=one[0]).wanted()
    assert wanted is not None and wanted.num_tokens == 1


def test_every_position_of_a_prefill_is_below_its_bound() -> None:
    cache = PagedCache(CacheSizes(1, 1, 1, 16, torch.float32, torch.device("cpu")), rows=2, capacity=64, pages=8)
    cache.open(0, 20)
    cache.open(1, 20)
    assert cache.prefill([(0, 5)], [4]).bound == 5
    step = cache.prefill([(0, 2)], [1])
    assert (step.bound, step.positions.tolist(), step.decoding) == (7, [5, 6], None)
    step = cache.prefill([(1, 3)], [2], decoding=[(0, 7)])
    assert step.bound == 8 and step.decoding is not None and step.decoding.bound == 8


def test_rows_past_num_tokens_do_not_reach_the_others(tmp_path: Path) -> None:
    """What a captured graph does: a batch of fixed size, a bound for the keys, only the first rows in use."""
    model = load_model(make(tmp_path))
    texts = prompts([9, 4])
    expected = torch.stack([model(torch.tensor([text]))[0, -1] for text in texts])
    cache = qwen3_last_layer.opened(model, 4, 16)
    ids = [token for text in texts for token in text[:-1]]
    model(torch.tensor(ids), cache, cache.prefill([(0, 8), (1, 3)], []))
    positions = torch.tensor([8, 3, 0, 0])
    step = DecodeStep(torch.arange(4), positions, bound=16, num_tokens=torch.tensor(2, dtype=torch.int32))
    got = model(torch.tensor([texts[0][-1], texts[1][-1], 0, 0]), cache, step)[:2]
    assert relative_error(got, expected) <= 1e-5


def test_a_closed_row_leaves_nothing_behind(tmp_path: Path) -> None:
    model = load_model(make(tmp_path))
    texts = prompts([20, 3, 6])
    cache = qwen3_last_layer.opened(model, 3, 24)
    model(torch.tensor(sum(texts, [])), cache, cache.prefill([(0, 20), (1, 3), (2, 6)], []))
    cache.v[:, cache.table[0].long()] = float("nan")  # whatever a finished sequence held must not reach another
    cache.close(0)
    assert cache.lengths[1:3] == [3, 6]
    got = model(torch.tensor([7, 7]), cache, cache.decode([1, 2], [3, 6]))
    expected = torch.stack([model(torch.tensor([text + [7]]))[0, -1] for text in texts[1:]])
    assert relative_error(got, expected) <= 1e-5


def test_moving_the_model_moves_its_experts(tmp_path: Path) -> None:
    """The operator must see the weights that .to() left behind the parameters, not those before it."""
    directory = make(tmp_path)
    model = load_model(directory)
    ids = torch.tensor(prompts([9]))
    model(ids)
    moved = model.to(torch.bfloat16)(ids)
    assert moved.dtype == torch.bfloat16
    assert torch.equal(moved, load_model(directory, dtype="bfloat16")(ids))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for layer in twin.layers:
            layer.mlp.down.zero_()
    assert torch.equal(model(ids), moved)
    assert not torch.equal(twin(ids), moved)


def test_forward_compiles_without_a_graph_break(tmp_path: Path) -> None:
    """No value is read back and no shape depends on data, so that a decode step can be captured."""
    model = load_model(make(tmp_path, num_hidden_layers=1))
    cache = qwen3_last_layer.opened(model, 2, 16)
    model(torch.tensor([3, 4, 5]), cache, cache.prefill([(0, 2), (1, 1)], []))
    step = cache.decode([0, 1], [2, 1])
    ids = torch.tensor([8, 9])
    expected = model(ids, cache, step)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert relative_error(compiled(ids, cache, step), expected) <= 1e-6
