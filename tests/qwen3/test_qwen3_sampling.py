"""Sampling against its definition, and generation: stops, streams, seeds, refusals."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3_checkpoints import make, prompts
from ttnn_moe.draws import kept_probabilities
from ttnn_moe.errors import RequestError
from ttnn_moe.models.qwen3 import PRESETS, Engine, Qwen3Moe, Tokenizer, generate, load_model, stream
from ttnn_moe.models.qwen3.runtime.prefill_graphs import size_for, sizes_to
from ttnn_moe.models.qwen3.runtime.requests import make_requests
from ttnn_moe.models.qwen3.runtime.runner import EagerRunner
from ttnn_moe.models.qwen3.runtime.sampling import Sampling, choose, seeds_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Qwen3Moe:
    return load_model(make(tmp_path_factory.mktemp("model")), backend="reference", device="cpu")


def by_definition(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """Token -> probability, in plain Python: temperature, the k largest, the fewest that reach top_p."""
    scaled = torch.tensor(logits, dtype=torch.float64) / sampling.temperature
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[: sampling.top_k or len(logits)]
    weights = [float(torch.exp(scaled[i] - scaled.max())) for i in order]
    probabilities = [w / sum(weights) for w in weights]
    kept, reached = {}, 0.0
    for token, p in zip(order, probabilities, strict=True):
        if reached >= sampling.top_p and sampling.top_p < 1:  # the sum may reach 1 before the last, by rounding
            break
        kept[token] = p
        reached += p
    return {token: p / sum(kept.values()) for token, p in kept.items()}


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    V=st.integers(1, 40),
    temperature=st.floats(0.1, 5),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1),
)
def test_kept_tokens_are_those_of_the_definition(
    seed: int, V: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(seed)) * 3
    sampling = Sampling(temperature, top_k, top_p)
    probabilities, tokens = kept_probabilities(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    for row in range(2):
        expected = by_definition(logits[row].tolist(), sampling)
        kept = probabilities[row] > 0
        got = dict(zip(tokens[row][kept].tolist(), probabilities[row][kept].tolist(), strict=True))
        got = {token: p / sum(got.values()) for token, p in got.items()}
        # rounding may move one token that sits on the edge of top_p, and any that are next to nothing
        edge = [token for token in got.keys() ^ expected.keys() if {**got, **expected}[token] > 1e-9]
        assert len(edge) <= (top_p < 1)
        if not edge:
            assert {token: got.get(token, 0) for token in expected} == pytest.approx(expected, rel=1e-4, abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**31), u=st.floats(0, 1, exclude_max=True))
def test_a_draw_is_the_inverse_of_the_cumulative_probability(seed: int, u: float) -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(seed)) * 2
    sampling = Sampling(0.8, 12, 0.9)
    expected = by_definition(logits[0].tolist(), sampling)
    token = int(choose(logits, sampling, torch.tensor([u], dtype=torch.float64)))
    ordered = list(expected)
    below = sum(expected[t] for t in ordered[: ordered.index(token)])
    assert below - 1e-6 <= u <= below + expected[token] + 1e-6


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    sampling = Sampling(1.3, 4, 0.95)
    n = 20000
    uniform = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(choose(logits.expand(n, -1), sampling, uniform), minlength=5) / n
    expected = by_definition(logits[0].tolist(), sampling)
    for token in range(5):
        p = expected.get(token, 0.0)
        # five standard deviations of a binomial
        assert abs(float(counts[token]) - p) <= 5 * (p * (1 - p) / n) ** 0.5


def test_greedy_and_the_limits_of_sampling() -> None:
    logits = torch.randn(50, 17, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(-1)
    u = torch.rand(50, dtype=torch.float64)
    assert torch.equal(choose(logits, Sampling()), best)
    assert torch.equal(choose(logits, Sampling(1.0, top_k=1), u), best)
    assert torch.equal(choose(logits, Sampling(1.0, top_p=1e-9), u), best)
    assert torch.equal(choose(logits, Sampling(1e-6), u), best)
    equal, _ = kept_probabilities(torch.zeros(1, 4), 1.0, 0, 0.5)
    assert equal.tolist() == [[0.25, 0.25, 0, 0]], "the fewest that reach top_p"
    spoiled = torch.full((2, 17), float("nan"))
    assert all(0 <= token < 17 for token in choose(spoiled, Sampling(1.0, 5, 0.9), u[:2]).tolist())


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}]
)
def test_options_out_of_range(options) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        Sampling(**options)


def test_a_seed_gives_the_same_text_whatever_the_batch(model: Qwen3Moe) -> None:
    texts = prompts([5, 9, 2, 12])
    options = {"max_new_tokens": 20, "temperature": 1.0, "top_p": 0.95, "stop_ids": ()}
    together = generate(model, texts, seed=7, **options).tokens
    assert generate(model, texts, seed=7, **options).tokens == together
    assert generate(model, texts, seed=8, **options).tokens != together
    for i, text in enumerate(texts):
        assert generate(model, [text], seed=7 + i, **options).tokens == [together[i]]
    backwards = generate(model, texts[::-1], seed=[10, 9, 8, 7], **options).tokens
    assert backwards == together[::-1]
    same = generate(model, [texts[0]] * 4, seed=7, **options).tokens
    assert len({tuple(tokens) for tokens in same}) == 4, "one prompt four times must not give one answer"
    assert generate(model, texts, **options).tokens != generate(model, texts, **options).tokens


def test_seeds_out_of_range() -> None:
    for seed in (-1, [1], [1, 2**63], 2**63 - 1):
        with pytest.raises(RequestError, match=r"bad seeds.*one integer, 0 \.\. 2\^63 - 2, or 2 of them"):
            seeds_of(seed, 2)
    assert seeds_of(2**63 - 2, 2) == [2**63 - 2, 2**63 - 1]


def test_seeds_that_differ_in_any_bit_draw_other_numbers() -> None:
    """torch's generator reads the lowest 32 bits of a seed; smaller seeds draw what it draws."""

    def drawn(seed: int) -> tuple[float, ...]:
        (request,) = make_requests(PRESETS["qwen3-30b-a3b"], [[1]], seed=seed)
        return tuple(float(request.draw()) for _ in range(4))

    seeds = [5, 2**32 - 1, *(5 + (1 << bit) for bit in range(32, 63)), 2**63 - 1]
    assert len({drawn(seed) for seed in seeds}) == len(seeds)
    for seed in seeds:
        assert drawn(seed) == drawn(seed) and all(0 <= one < 1 for one in drawn(seed))
    for seed in (0, 5, 2**32 - 1):
        numbers = torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert drawn(seed) == tuple(numbers.tolist())


def test_the_largest_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seeds_of(2**63 - 1, 1) == [2**63 - 1]
    monkeypatch.setattr("os.urandom", lambda n: b"\xff" * n)
    first, last = seeds_of(None, 2)
    assert last == first + 1, "fresh seeds leave room for those that follow"


def test_sequences_stop_one_by_one(model: Qwen3Moe) -> None:
    """Each ends at its own first stop token, the others go on as if it had never been there."""
    texts = prompts([5, 9, 2, 12])
    free = generate(model, texts, max_new_tokens=30, stop_ids=())
    assert free.finish == ["length"] * 4 and all(len(tokens) == 30 for tokens in free.tokens)
    stops = [free.tokens[0][3], free.tokens[2][11]]
    start = time.perf_counter()
    got = generate(model, texts, max_new_tokens=30, stop_ids=stops)
    seconds = time.perf_counter() - start
    for whole, tokens, finish in zip(free.tokens, got.tokens, got.finish, strict=True):
        first = next((i for i, token in enumerate(whole) if token in stops), None)
        assert tokens == (whole if first is None else whole[: first + 1])
        assert finish == ("length" if first is None else "stop")
    assert "stop" in got.finish
    stats = got.stats
    assert stats.new_tokens == sum(map(len, got.tokens)) and stats.prompt_tokens == 28
    assert stats.decode_tokens == stats.new_tokens - 4
    assert stats.decode_steps == max(map(len, got.tokens)) - 1
    assert stats.first_token_s > 0 and stats.tokens_per_s >= stats.tokens_per_s_user > 0
    assert stats.decode_s < seconds


class RunnerAhead(EagerRunner):
    """As on a GPU, where steps wait on the device; writes down what is launched and what is read."""

    def __init__(self, model: Qwen3Moe, cache: Any, seen: list[str]):
        super().__init__(model, cache)
        self.seen, self.made = seen, 0

    def prefill(self, *args: Any) -> Any:
        return self._pending(super().prefill(*args))

    def decode(self, *args: Any) -> Any:
        return self._pending(super().decode(*args))

    def _pending(self, made: Any) -> Any:
        number = self.made = self.made + 1
        self.seen.append(f"launch {number}")

        def tokens() -> list[int]:
            self.seen.append(f"read {number}")
            return made.tokens()

        return SimpleNamespace(tokens=tokens, seconds=lambda: 1.0)


@pytest.mark.parametrize("seed", range(6))
def test_steps_launched_ahead_give_the_same_tokens(model: Qwen3Moe, seed: int) -> None:
    """Whatever ends when; and the device never waits for tokens that were not read."""
    texts = prompts([5, 9, 2, 12])
    drawn = {"temperature": 1.3, "seed": seed} if seed % 2 else {}
    free = generate(model, texts, max_new_tokens=20, stop_ids=(), **drawn).tokens
    stops = [free[seed % 4][3 + seed], free[(seed + 1) % 4][12]] if seed else ()
    want = generate(model, texts, max_new_tokens=20, stop_ids=stops, **drawn)
    engine, seen = Engine(model, 4, 32), []
    engine.scheduler.runner, engine.scheduler.ahead = RunnerAhead(model, engine.cache, seen), True
    got = generate(model, texts, max_new_tokens=20, stop_ids=stops, engine=engine, **drawn)
    assert got.tokens == want.tokens and got.finish == want.finish
    assert got.stats.decode_tokens == want.stats.decode_tokens and got.stats.decode_steps == want.stats.decode_steps
    assert got.stats.decode_s >= got.stats.decode_steps
    assert seen[:3] == ["launch 1", "read 1", "launch 2"], "nothing delays the first tokens"
    for made in range(2, 20):
        if f"read {made}" in seen:
            assert seen.index(f"launch {made + 1}") < seen.index(f"read {made}")
    assert "launch 21" not in seen


def test_prompts_that_follow_each_other_are_launched_before_first_tokens_are_read(model: Qwen3Moe) -> None:
    engine, seen = Engine(model, 3, 32), []
    engine.scheduler.runner, engine.scheduler.ahead = RunnerAhead(model, engine.cache, seen), True
    texts = prompts([5, 5, 5])
    got = generate(model, texts, max_new_tokens=1, stop_ids=(), engine=engine, prefill_chunk=5)
    assert seen == ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "read 3"]
    assert got.tokens == generate(model, texts, max_new_tokens=1, stop_ids=()).tokens
    assert got.stats.decode_steps == 0 and got.stats.first_token_s > 0


def test_stop_tokens_of_the_config_are_the_default(model: Qwen3Moe) -> None:
    assert model.config.eos_token_ids == (5,)
    text = prompts([6])
    tokens = generate(model, text, max_new_tokens=200, temperature=3.0, seed=1).tokens[0]
    assert tokens[-1] == 5 and 5 not in tokens[:-1]


def test_streaming_is_not_streaming(model: Qwen3Moe, tmp_path: Path) -> None:
    from qwen3_tokenizers import build

    tokenizer = Tokenizer.from_directory(build(tmp_path))
    texts = prompts([5, 9, 2])
    options = {"max_new_tokens": 25, "temperature": 1.5, "seed": 3, "tokenizer": tokenizer, "stop_ids": (7, 8, 9, 10)}
    seen = []
    whole = generate(model, texts, on_token=seen.append, **options)
    events = list(stream(model, texts, **options))
    assert events == seen
    for i in range(3):
        own = [event for event in events if event.sequence == i]
        assert [event.token for event in own] == whole.tokens[i]
        assert "".join(event.text for event in own) == whole.texts[i] == tokenizer.decode(whole.tokens[i])
        assert [event.finish for event in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish == whole.finish[i]
    # a caller may stop listening at any time
    some = stream(model, texts, **options)
    assert next(some) == events[0]
    some.close()


BAD = {
    "empty prompt": ([[1], []], {}, "prompt 1 is empty"),
    "too long": ([[1], [1] * 250], {"max_new_tokens": 7}, "prompt 1 is too long for the context"),
    "id too large": ([[1, 2], [3, 320]], {}, "position 1 of prompt 1"),
    "id negative": ([[-1]], {}, "position 0 of prompt 0"),
    "id of 64 bits": ([[1, 2**63]], {}, "position 1 of prompt 0"),
    "id of more bits": ([[1, 0, 2**64]], {}, "position 2 of prompt 0"),
    "nothing new": ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0"),
    "no chunk": ([[1]], {"prefill_chunk": 0}, "prefill_chunk=0"),
    "temperature": ([[1]], {"temperature": -0.5}, "temperature"),
    "seeds": ([[1]], {"seed": [1, 2]}, "bad seeds"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_requests_are_refused_before_any_work(name: str, model: Qwen3Moe, monkeypatch) -> None:
    texts, options, words = BAD[name]
    monkeypatch.setattr(Qwen3Moe, "forward", lambda *_: pytest.fail("work was done"))
    with pytest.raises(RequestError) as error:
        stream(model, texts, **options)  # not even iterated
    assert words in str(error.value)


@pytest.mark.parametrize("kind", [tuple, bytes, torch.tensor])
def test_prompts_of_any_sequence(kind: Any, model: Qwen3Moe) -> None:
    text = prompts([9], 256)[0]
    options = {"max_new_tokens": 3, "stop_ids": ()}
    assert generate(model, [kind(text)], **options).tokens == generate(model, [text], **options).tokens


def test_the_whole_context_can_be_used(model: Qwen3Moe) -> None:
    assert len(generate(model, prompts([250]), max_new_tokens=6, stop_ids=()).tokens[0]) == 6
    assert generate(model, [], max_new_tokens=6).tokens == []


@pytest.mark.parametrize("ids", [[[0, 320]], [[-1, 3]], [[0] * 257], [0, 1]])
def test_calling_the_model_on_bad_ids(ids, model: Qwen3Moe) -> None:
    with pytest.raises(RequestError):
        model(torch.tensor(ids))
    assert model(torch.zeros(0, 4, dtype=torch.int64)).shape == (0, 4, 320)


def test_an_engine_generates_again_and_again(model: Qwen3Moe) -> None:
    engine = Engine(model, 3, 40)
    engine.capture(lambda done, total: pytest.fail("nothing is captured on a CPU"))
    for lengths, seed in (([5, 9, 2], 1), ([30], 2), ([1, 12], 3), ([4, 9, 2, 7, 1, 11, 3, 5], 4), ([5, 9, 2], 1)):
        texts, options = prompts(lengths, seed=seed), {"max_new_tokens": 10, "stop_ids": ()}
        assert generate(model, texts, engine=engine, **options).tokens == generate(model, texts, **options).tokens
    assert not engine.busy and engine.load().free_rows == 3 and engine.load().free_pages == engine.cache.total


def test_what_an_engine_refuses_to_generate(model: Qwen3Moe) -> None:
    engine = Engine(model, 2, 13, max_waiting=1)
    for texts, words in (
        (prompts([3] * 4), "would wait.*4 prompts for 2 rows"),
        (prompts([9]), "too long for a row.*9 tokens and 5"),
    ):
        with pytest.raises(RequestError, match=words):
            generate(model, texts, max_new_tokens=5, engine=engine)
    assert generate(model, prompts([3] * 3), max_new_tokens=1, engine=engine).stats.new_tokens == 3, "one may wait"
    first = stream(model, prompts([3]), max_new_tokens=5, stop_ids=(), engine=engine)
    second = stream(model, prompts([4]), max_new_tokens=5, engine=engine)
    next(first)
    with pytest.raises(RequestError, match="serves other requests"):
        stream(model, prompts([3]), max_new_tokens=5, engine=engine)
    with pytest.raises(RequestError, match="serves other requests"):
        next(second)
    first.close()
    assert engine.load().free_rows == 2
    assert len(generate(model, prompts([8]), max_new_tokens=5, stop_ids=(), engine=engine).tokens[0]) == 5
    other = Qwen3Moe.empty(model.config, "reference", torch.float32, "cpu")
    with pytest.raises(RequestError, match="another model's"):
        generate(other, prompts([3]), engine=engine)
    with pytest.raises(RequestError, match="rows=0"):
        Engine(model, 0, 5)
    with pytest.raises(RequestError, match="no step of this model can be captured"):
        Engine(model, 1, 5, graphs=True)


def test_requests_added_meanwhile_run_beside_a_generation(model: Qwen3Moe) -> None:
    engine, options = Engine(model, 3, 40), {"max_new_tokens": 10, "stop_ids": ()}
    texts = prompts([5, 9, 7])
    made = stream(model, texts[:2], engine=engine, **options)
    seen = [next(made)]
    number = engine.add(texts[2], **options)
    seen += made
    want = generate(model, texts, **options).tokens
    for i in range(2):
        assert [token.token for token in seen if token.sequence == i] == want[i]
    assert [token.token for token in engine.stream(number)] == want[2]


def test_steps_of_a_prefill() -> None:
    """The next size."""
    sizes = sizes_to(4096)
    assert sizes == [64, 128, 256, *range(512, 4097, 256)]
    assert [size_for(T, sizes) for T in (1, 64, 65, 1025, 2048)] == [64, 64, 128, 1280, 2048]
    assert [size_for(T, sizes) for T in (2049, 2816, 3073, 4096, 4097)] == [2304, 2816, 3328, 4096, None]
    assert sizes_to(64) == [64] and size_for(65, [64]) is None and sizes_to(1024) == [64, 128, 256, 512, 768, 1024]
