"""Arguments of the engine, of requests and of sampling: right or refused when they are given, never in a step."""

from __future__ import annotations

from dataclasses import astuple
from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odd_arguments import Broken, anything
from qwen3_checkpoints import TINY
from ttnn_moe.arguments import as_integer
from ttnn_moe.errors import CheckpointError, RequestError
from ttnn_moe.kv.paged import PagedCache
from ttnn_moe.models.qwen3 import Engine, Qwen3Moe, Qwen3MoeConfig, Tokenizer, generate, load_model, stream
from ttnn_moe.models.qwen3.runtime.engine import Load
from ttnn_moe.models.qwen3.runtime.limits import Limits
from ttnn_moe.models.qwen3.runtime.requests import Stats
from ttnn_moe.models.qwen3.runtime.sampling import Sampling, choose
from ttnn_moe.visible import LONGEST

GOOD = {"max_new_tokens": 2, "stop_ids": (), "seed": 1}
OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop_ids")
NAN, HUGE = float("nan"), 10**400


@cache
def tiny() -> Qwen3Moe:
    return load_model(TINY, backend="reference", device="cpu", dtype=torch.float32)


@cache
def engine() -> Engine:
    return Engine(tiny(), 3, 64, page=16)


@cache
def expected() -> list[int]:
    return generate(tiny(), [[3, 4]], **GOOD).tokens[0]


def check_words(error: RequestError) -> None:
    assert None not in (error.got, error.expected, error.remedy) and len(str(error)) < LONGEST + 500


def serve(prompt: Any, options: dict[str, Any]) -> bool:
    """Whether the engine takes a request; if so, no step raises, and a request beside it gets what it gets alone."""
    other = engine().add([3, 4], **GOOD)
    try:
        number = engine().add(prompt, **options)
    except RequestError as error:
        check_words(error)
        number = None
    tokens = []
    while len(tokens) < 2:
        tokens += [token.token for token in engine().step() if token.sequence == other]
    if number is not None:
        engine().cancel(number)
    assert tokens == expected() and engine().load() == Load(0, 0, 3, engine().cache.total)
    return number is not None


@settings(max_examples=60, deadline=None)
@given(options=st.dictionaries(st.sampled_from(OPTIONS), anything(), max_size=2), prompt=st.none() | anything())
def test_any_request_is_refused_or_served(options: dict[str, Any], prompt: Any) -> None:
    serve([5] if prompt is None else prompt, {**GOOD, **options})


REFUSED = [
    ("max_new_tokens", [2.0, NAN, True, "2", None, HUGE, Fraction(2), torch.tensor(2.0), torch.tensor([2]), Broken()]),
    ("top_k", [2.0, True, np.bool_(1), NAN, HUGE, -1, "4", torch.tensor(True)]),
    ("temperature", [HUGE, NAN, float("inf"), "1", None, 1j, True, [1.0], torch.tensor([1.0]), Broken()]),
    ("top_p", [0, NAN, True, HUGE, 1.0000001, "0.5", torch.tensor(0.5j)]),
    ("seed", [True, 1.0, "1", [1.0], [True], [1, 2], -1, 2**63, {1}, Broken(), torch.tensor(1.5)]),
    (
        "stop_ids",
        [5, "5", [5.0], [True], [-1], [512], {1: 2}, [None], range(10**12), torch.ones(2), Broken(), [Broken()]],
    ),
]


@pytest.mark.parametrize("name, values", REFUSED, ids=[f"{name}-{len(values)}" for name, values in REFUSED])
def test_what_a_request_may_not_ask(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=name.replace("seed", "bad seeds")) as error:
            engine().add([5], **{**GOOD, name: value})
        check_words(error.value)


@pytest.mark.parametrize("device", [3.5, True, [], b"cpu", torch.float32, Broken(), 10**30, "", "cuda:99", "hpu", -1])
def test_what_is_no_device(device: Any) -> None:
    with pytest.raises(RequestError, match="device is no device|no device .*here") as error:
        load_model(TINY, backend="reference", device=device)
    assert None not in (error.value.got, error.value.remedy)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_tokens": "many"}, r"'max_tokens'; did you mean 'max_new_tokens'\?"),
        ({"xyz": True}, "'xyz'; it has .*temperature, top_k"),
    ],
)
@pytest.mark.parametrize("function", ["add", "generate", "stream"])
def test_an_option_that_is_none_is_refused_by_the_function_that_was_called(
    function: str, given: dict[str, Any], words: str
) -> None:
    call = {
        "add": lambda **options: engine().add([5], **options),
        "generate": lambda **options: generate(tiny(), [[5]], **options),
        "stream": lambda **options: stream(tiny(), [[5]], **options),
    }[function]
    with pytest.raises(TypeError, match=rf"^{function}\(\) got an unexpected keyword argument {words}"):
        call(**GOOD, **given)


def test_generate_takes_no_stats() -> None:
    with pytest.raises(TypeError, match=r"^generate\(\) got an unexpected keyword argument 'stats'"):
        generate(tiny(), [[5]], **GOOD, stats=Stats())


TAKEN = [
    ("max_new_tokens", 3, [np.int16(3), torch.tensor(3), np.array(3)]),
    ("temperature", 0.5, [Fraction(1, 2), np.float16(0.5), torch.tensor(0.5), np.float64(0.5)]),
    ("top_k", 4, [np.uint8(4), torch.tensor(4, dtype=torch.int8), 4]),
    ("seed", 6, [np.int64(6), [6], torch.tensor([6]), (np.int32(6),)]),
]


@pytest.mark.parametrize("name, plain, others", TAKEN, ids=[name for name, _, _ in TAKEN])
def test_numbers_of_every_library_mean_the_same(name: str, plain: Any, others: list[Any]) -> None:
    options = {"max_new_tokens": 6, "stop_ids": (), "seed": 6, "temperature": 1.5}
    want = generate(tiny(), [[3, 4]], **{**options, name: plain}).tokens
    for value in others:
        assert generate(tiny(), [[3, 4]], **{**options, name: value}).tokens == want


@pytest.mark.parametrize("kind", [torch.tensor, np.array, tuple, set, frozenset, lambda ids: np.array(ids, np.uint16)])
def test_stop_ids_of_every_kind_stop(kind: Any) -> None:
    free = generate(tiny(), [[3, 4]], max_new_tokens=8, stop_ids=()).tokens[0]
    got = generate(tiny(), [[3, 4]], max_new_tokens=8, stop_ids=kind([free[2], 500]))
    assert got.tokens[0] == free[: free.index(free[2]) + 1] and got.finish == ["stop"]


def test_ids_that_are_no_ids() -> None:
    tensors = torch.ones(2), torch.ones(2, 2).long(), torch.tensor([1, 2]).to_sparse()
    for prompt in ([True], [1.0], [1, 2.0], [None], "12", {1, 2}, {1: 2}, *tensors, 5):
        with pytest.raises(RequestError) as error:
            engine().add(prompt, **GOOD)
        check_words(error.value)
    for prompts in (5, "12", [1, 2], {1: [2]}, None, iter([[1]]), torch.tensor(1)):
        with pytest.raises(RequestError) as error:
            generate(tiny(), prompts, **GOOD)
        check_words(error.value)


def test_ids_that_the_model_itself_does_not_take() -> None:
    none = [[1, 2, 3]], [torch.tensor([1, 2])], None, np.array([[1]])
    elsewhere = torch.ones(1, 2, dtype=torch.int64, device="meta")
    bad = torch.tensor([1, 2]), torch.rand(1, 2), torch.tensor([[-1]]), torch.ones(1, 10**4).long(), elsewhere
    for ids in (*none, *bad):
        with pytest.raises(RequestError) as error:
            tiny()(ids)
        check_words(error.value)
        assert ("torch.tensor([ids])" in str(error.value)) == (not isinstance(ids, torch.Tensor))
    cache = tiny().new_cache(1, 64)
    cache.open(0, 2)
    for alone in ({"cache": cache}, {"step": cache.prefill([(0, 2)], [1])}):
        with pytest.raises(RequestError, match="a cache and a step belong together") as error:
            tiny()(torch.tensor([[1, 2]]), **alone)
        check_words(error.value)


@pytest.mark.parametrize("temperature", [1e-37, 1e-38, 1e-40, 1e-45, 5e-324, 1e-300])
def test_temperatures_next_to_nothing_choose_the_largest(temperature: float) -> None:
    logits = torch.randn(50, 17, generator=torch.Generator().manual_seed(0)) * 30
    u = torch.rand(50, dtype=torch.float64)
    for sampling in (Sampling(temperature), Sampling(temperature, 5, 0.9)):
        assert torch.equal(choose(logits, sampling, u), logits.argmax(-1))
        assert torch.equal(choose(logits.bfloat16(), sampling, u), logits.bfloat16().argmax(-1))


def test_temperatures_without_end_choose_evenly() -> None:
    logits = torch.tensor([[3.0, float("-inf"), 50.0, -20.0]])
    u = torch.linspace(0, 0.999, 999, dtype=torch.float64)
    chosen = choose(logits.expand(999, -1), Sampling(1e308), u)
    assert torch.bincount(chosen, minlength=4).tolist() == [333, 0, 333, 333]


ENGINE = [
    ("rows", [0, True, 2.0, "2", HUGE, 2**17, None]),
    ("capacity", [0, 64.0, True, "64", -1]),
    ("memory", [0, 1e9, True, HUGE, "1"]),
    ("page", [24, 16.0, True, 8, HUGE, -16]),
    ("prefill_chunk", [2.5, 0, True, NAN, "8"]),
    ("max_waiting", [0, -1, 1.0, True, HUGE]),
    ("graphs", [1, "yes", True]),
    ("tokenizer", [5, "tokenizer", object(), Tokenizer]),
    ("cache", [5, object(), {}]),
]


@pytest.mark.parametrize("name, values", ENGINE, ids=[name for name, _ in ENGINE])
def test_what_an_engine_does_not_take(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError):
            Engine(tiny(), **{"rows": 1, "capacity": 32, "page": 16, name: value})


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*(name for name, _ in ENGINE)]), st.one_of(anything(), st.integers(1, 64)), max_size=2
    )
)
def test_any_engine_is_refused_or_works(options: dict[str, Any]) -> None:
    try:
        made = Engine(tiny(), **{"rows": 2, "capacity": 32, **options})
    except RequestError:
        return
    try:
        made.add([3, 4], **GOOD)
    except RequestError as error:
        assert "too long for a row" in str(error)
        return
    assert [token.token for _ in range(4) for token in made.step()] == expected()


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(["rows", "capacity", "pages", "page", "memory"]), anything(), min_size=1))
def test_any_cache_is_refused_or_made(options: dict[str, Any]) -> None:
    sizes = tiny().cache_sizes
    makes = (PagedCache.within, {"memory": 1 << 20}) if "pages" not in options else (PagedCache, {"pages": 2})
    given = {"rows": 2, "capacity": 32, "page": 16, **makes[1], **options}
    if "pages" in options:
        given.pop("memory", None)
    try:
        made = makes[0](sizes, **given)
    except RequestError:
        return
    assert made.free == made.total > 0 and made.k.shape[1] == 1 + made.total


@pytest.mark.parametrize("name", ["rows", "capacity", "pages", "page"])
@pytest.mark.parametrize("size", [2**20, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**64])
def test_a_cache_that_no_machine_holds(name: str, size: int) -> None:
    given = {"rows": 2**12, "capacity": 2**20, "pages": 2**16, "page": 2**20, name: size}
    with pytest.raises(RequestError) as error:
        PagedCache(tiny().cache_sizes, **given)
    check_words(error.value)


def test_caches_that_an_engine_does_not_take() -> None:
    used = tiny().new_cache(2, 32)
    Engine(tiny(), cache=used).add([1], max_new_tokens=1)
    used.open(0, 5)
    with pytest.raises(RequestError, match="the cache is in use"):
        Engine(tiny(), cache=used)
    sizes = tiny().cache_sizes
    with pytest.raises(RequestError, match="another model"):
        Engine(tiny(), cache=PagedCache(type(sizes)(**{**vars(sizes), "layers": 2}), 2, 32, 4))
    with pytest.raises(RequestError, match="no cache; got 5; expected a RowCache"):
        Engine(tiny(), cache=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"memory": 1 << 20}, {"page": 16}, {"kv": "bucketed"}, {"kv_bits": 3}], ids=str)
def test_a_given_cache_has_its_own_pages(options: dict[str, Any]) -> None:
    given, (name,) = tiny().new_cache(2, 64), options
    with pytest.raises(
        RequestError, match=f"a given cache has its own pages and format; got cache= and {name}; expected one"
    ):
        Engine(tiny(), cache=given, **options)
    assert Engine(tiny(), cache=given).rows == 2


def test_rows_of_an_engine_end_at_65536() -> None:
    def rows(asked: int) -> int:
        return Limits(asked, 64, None, None, None, None).checked(tiny(), None, "paged").rows

    assert rows(65_536) == 65_536
    with pytest.raises(RequestError, match=r"rows is out of range; got rows=65537; expected an integer, 1 \.\. 65536"):
        rows(65_537)


@pytest.mark.parametrize("options", [{"prefill_chunk": 2.5}, {"prefill_chunk": True}, {"engine": 5}, {"on_token": 5}])
def test_what_generate_does_not_take(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as error:
        generate(tiny(), [[1]], **GOOD, **options)
    check_words(error.value)


def test_a_capacity_beyond_the_context_is_the_context() -> None:
    assert Engine(tiny(), 1, 10**12).capacity == tiny().config.max_position_embeddings
    assert [Engine(tiny(), 1, n, cache=tiny().new_cache(2, 64)).capacity for n in (20, 10**12)] == [20, 64]


def test_prompt_tokens_of_a_step_unless_asked_for() -> None:
    """Twice as many where prompts run eagerly on a GPU, the bucketed cache given or named; more of one prompt alone."""

    def chunk(
        kind: str, rows: int, cache: Any = None, kv: str = "paged", asked: int | None = None
    ) -> tuple[int, int, bool]:
        model: Any = SimpleNamespace(device=torch.device(kind), config=tiny().config)
        return astuple(Limits(rows, 64, None, None, asked, None).checked(model, cache, kv).prefill_chunk)

    held = tiny().new_cache(40, 1024, kv="bucketed", kv_bits=4)
    assert [chunk("cuda", 40), chunk("cuda", 60_000)] == [(1984, 4096, False), (256, 4096, False)]
    assert [chunk("cuda", 40, kv="bucketed"), chunk("cuda", 1, held)] == [(4032, 4032, True)] * 2
    assert [chunk("cpu", 40), chunk("cpu", 40, kv="bucketed")] == [(256, 2048, False), (256, 256, True)]
    assert [chunk("cuda", 1, asked=7), chunk("cuda", 1, held, asked=7)] == [(7, 7, False), (7, 7, True)]


def test_a_prompt_is_the_callers_to_write_to() -> None:
    for prompt in (torch.tensor([3, 4]), np.array([3, 4]), [3, 4]):
        number = engine().add(prompt, **GOOD)
        prompt[0] = 9
        assert [token.token for token in engine().stream(number)] == expected()


@given(number=anything())
@settings(max_examples=60, deadline=None)
def test_numbers_that_no_request_has(number: Any) -> None:
    """An integer that no request has is one that is over. Anything else is refused."""
    number = 10**6 if type(number) is int and number < 10**6 else number
    found = as_integer(number)
    if found is not None and 10**6 <= found < 2**63:
        assert engine().cancel(number) is False and engine().waits_for(number) is None
        with pytest.raises(RequestError, match="is not known, or over"):
            engine().stream(number)
        return
    if found is not None and 0 <= found < 10**6:
        return
    for call in (engine().cancel, engine().waits_for, engine().stream):
        with pytest.raises(RequestError, match="number is no integer|number is out of range") as error:
            call(number)
        check_words(error.value)


@pytest.mark.parametrize("value", [None, 5, "model", Engine, {}], ids=str)
def test_what_is_no_model(value: Any) -> None:
    for call in (Engine, lambda model: generate(model, [[1]]), lambda model: stream(model, [[1]])):
        with pytest.raises(RequestError, match="no model; got .*load_model") as error:
            call(value)
        check_words(error.value)


@pytest.mark.parametrize("value", [None, 5, b"model", ["model"]], ids=str)
def test_what_is_no_directory(value: Any) -> None:
    for call in (load_model, Tokenizer.from_directory, Qwen3MoeConfig.from_directory):
        with pytest.raises(CheckpointError, match="no directory of a checkpoint; got .*; to fix it: "):
            call(value)
