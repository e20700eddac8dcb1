"""The engine on a CPU: pages, requests that come and go, streams, refusals."""

from __future__ import annotations

import gc
import random
import threading
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3_checkpoints import TINY, prompts
from ttnn_moe.errors import RequestError
from ttnn_moe.kv.bucketed import allocation
from ttnn_moe.kv.bucketed.cache import BucketedCache
from ttnn_moe.kv.paged import PagedCache
from ttnn_moe.kv.pages import PagePool
from ttnn_moe.models.qwen3 import Engine, Qwen3Moe, Tokenizer, generate, load_model
from ttnn_moe.models.qwen3.runtime.engine import Load

PAGE = 16


@cache
def tiny() -> Qwen3Moe:
    return load_model(TINY, backend="reference", device="cpu", dtype=torch.float32)


@pytest.fixture(params=["paged", "bucketed"])
def kv(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A cache format. The high tier of the bucketed one is small, so that tokens move."""
    monkeypatch.setattr(allocation, "HIGH", ((4, 60),))
    return request.param


def engine(rows: int = 3, capacity: int = 96, pages: int | None = None, kv: str = "paged", **options: Any) -> Engine:
    """With so many pages of 16 tokens; in the bucketed cache of 32."""
    if kv == "bucketed":
        held = BucketedCache(
            tiny().cache_sizes, rows, capacity, rows * capacity // 32 if pages is None else pages, 16, 32
        )
        # whole prompts: pieces attend to what the tiers keep of the pieces before
        return Engine(tiny(), cache=held, **{"prefill_chunk": 500, **options})
    one = PagedCache.page_bytes(tiny().cache_sizes, PAGE)
    return Engine(
        tiny(),
        rows,
        capacity,
        memory=None if pages is None else pages * one,
        page=PAGE,
        **{"prefill_chunk": 24, **options},
    )


def asked(n: int, seed: int, longest: int = 50, new: int = 20) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts with options: greedy and drawn, stopped by a token and by length."""
    rng = random.Random(seed)
    out = []
    for i, text in enumerate(prompts([rng.randint(1, longest) for _ in range(n)], 500, seed)):
        options = {"max_new_tokens": rng.choice([1, 2, new, rng.randint(1, new)]), "seed": seed + i}
        if rng.random() < 0.5:
            options |= {"temperature": rng.choice([0.7, 1.5]), "top_p": rng.choice([0.9, 1.0]), "top_k": 40}
        options["stop_ids"] = tuple(rng.sample(range(500), 30)) if rng.random() < 0.5 else ()
        out.append((text, options))
    return out


def alone(text: list[int], kv: str = "paged", **options: Any) -> list[int]:
    """The tokens of a request that runs by itself."""
    return generate(tiny(), [text], engine=engine(1, 192, kv=kv) if kv != "paged" else None, **options).tokens[0]


def collect(engine: Engine, got: dict[int, list[int]] | None = None) -> dict[int, list[int]]:
    got = {} if got is None else got
    while engine.busy:
        for token in engine.step():
            got.setdefault(token.sequence, []).append(token.token)
    return got


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 12), moves=st.lists(st.integers(0, 6), max_size=40), seed=st.integers(0, 99))
def test_no_page_is_given_twice_and_none_is_lost(n: int, moves: list[int], seed: int) -> None:
    pool, held, rng = PagePool(n), [], random.Random(seed)
    for size in moves:
        if size <= pool.free:
            held.append(pool.take(size))
        elif held:
            pool.give(held.pop(rng.randrange(len(held))))
        taken = [page for pages in held for page in pages]
        assert len(set(taken)) == len(taken) and pool.free == n - len(taken)
        assert all(1 <= page <= n for page in taken)
    for pages in held:
        pool.give(pages)
    assert sorted(pool.take(n)) == list(range(1, n + 1))
    with pytest.raises(AssertionError):
        pool.take(1)


def test_rows_share_no_page_and_the_table_says_which_they_have() -> None:
    cache = PagedCache(tiny().cache_sizes, 3, 40, 5, PAGE)
    assert cache.capacity == 48 and cache.table.shape == (4, 3)
    cache.open(0, 33)
    cache.open(2, 17)
    used = cache.table[0].tolist() + cache.table[2, :2].tolist()
    assert sorted(used) == [1, 2, 3, 4, 5] and not cache.pool.free
    assert not cache.table[1].any() and not cache.table[cache.spare].any() and cache.table[2, 2] == 0
    with pytest.raises(RequestError, match="does not fit the KV cache.*at most 32"):
        cache.prefill([(2, 33)], [])
    cache.close(0)
    cache.open(1, 48)
    assert sorted(cache.table[1].tolist()) == sorted(used[:3])
    for bad in ({"page": 24}, {"page": 8}, {"pages": 0}, {"rows": 0}, {"capacity": 0}):
        with pytest.raises(RequestError):
            PagedCache(tiny().cache_sizes, **{"rows": 1, "capacity": 16, "pages": 1, **bad})


@settings(max_examples=16, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 6),
    pages=st.integers(5, 14),
    chunk=st.sampled_from([5, 13, 64]),
    ahead=st.booleans(),
)
def test_every_request_gets_what_it_gets_alone(seed: int, rows: int, pages: int, chunk: int, ahead: bool) -> None:
    """Whatever joins and leaves meanwhile; and in the end everything is free."""
    random_arrivals(seed, engine(rows, pages=pages, prefill_chunk=chunk), "paged", ahead)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_request_gets_what_it_gets_alone_at_16_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "HIGH", ((4, 60),))
    random_arrivals(seed, engine(3, pages=6, kv="bucketed"), "bucketed", ahead=seed == 2)


def random_arrivals(seed: int, serving: Engine, kv: str, ahead: bool) -> None:
    rng, rows = random.Random(seed), serving.rows
    serving.scheduler.ahead = ahead  # as with graphs
    got: dict[int, list[int]] = {}
    wanted, cancelled = {}, set()
    for text, options in asked(6, seed, new=12):
        number = serving.add(text, **options)
        wanted[number] = alone(text, kv, **options)
        for _ in range(rng.choice([0, 0, 1, 5])):
            for token in serving.step():
                assert token.sequence not in cancelled
                got.setdefault(token.sequence, []).append(token.token)
        if rng.random() < 0.2:
            victim = rng.choice(list(wanted))
            over = victim in cancelled or len(got.get(victim, ())) == len(wanted[victim])
            assert serving.cancel(victim) == (not over)
            assert not serving.cancel(victim)
            if not over:
                cancelled.add(victim)
    collect(serving, got)
    for number, tokens in wanted.items():
        have = got.get(number, [])
        assert have == (tokens[: len(have)] if number in cancelled else tokens)
    assert serving.load() == Load(0, 0, rows, serving.cache.total)
    assert (
        not serving._requests
        and not serving.scheduler.filling
        and all(request.over for request in serving.scheduler.decoding)
    )


def test_a_request_draws_its_own_tokens_whatever_the_batch(kv: str) -> None:
    text = prompts([9], 500)[0]
    options = {"max_new_tokens": 20, "temperature": 1.3, "top_p": 0.95, "stop_ids": ()}
    by_itself = alone(text, kv, seed=5, **options)
    serving = engine(4, kv=kv)
    others = [serving.add(text, seed=seed, **options) for seed in (6, 7)]
    got: dict[int, list[int]] = {}
    for token in serving.step():
        got.setdefault(token.sequence, []).append(token.token)
    number = serving.add(text, seed=5, **options)
    serving.add(text, **options)
    collect(serving, got)
    assert got[number] == by_itself and len({tuple(tokens) for tokens in got.values()}) == 4
    assert [got[n] for n in others] == [alone(text, kv, seed=s, **options) for s in (6, 7)]


def test_what_a_page_held_reaches_nobody(kv: str) -> None:
    """Pages are not cleared between requests."""
    serving = engine(3, pages=8, kv=kv)
    if isinstance(serving.cache, BucketedCache):
        for tiers in serving.cache.places.tiers.values():
            tiers.together.payload.fill_(255), tiers.together.scales.fill_(float("nan"))
    else:
        for kept in (serving.cache.k, serving.cache.v):
            kept.fill_(float("nan"))
    todo = asked(5, 3)
    numbers = [serving.add(text, **options) for text, options in todo]
    got = collect(serving)
    assert [got[n] for n in numbers] == [alone(text, kv, **options) for text, options in todo]


def test_long_prompts_do_not_hold_up_those_that_decode(kv: str) -> None:
    serving = engine(4, 400, kv=kv, prefill_chunk=10)
    short = serving.add(prompts([4], 500)[0], max_new_tokens=30, stop_ids=())
    serving.step()
    long = [serving.add(text, max_new_tokens=2, stop_ids=()) for text in prompts([95, 40], 500)]
    ended: list[int] = []
    for step in range(1, 40):
        made = serving.step()
        ended += [token.sequence for token in made if token.finish]
        if step < 29:
            assert [token.sequence for token in made].count(short) == 1, "a token every step"
        if long[0] in ended:
            assert step == 11, "95 tokens, 10 a step, then one more token"
            break
    assert long[1] not in ended
    assert {n: len(tokens) for n, tokens in collect(serving).items()}[long[1]] == 2


def test_the_last_layer_runs_for_new_tokens_only() -> None:
    serving, seen = engine(2, prefill_chunk=10), {}
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda mlp, args: seen.setdefault(mlp, []).append(len(args[0])))
        for layer in (tiny().layers[0], tiny().layers[-1])
    ]
    serving.add([5] * 3, max_new_tokens=5, stop_ids=())
    serving.add([6] * 23, max_new_tokens=2, stop_ids=())
    made = [len(serving.step()) for _ in range(4)]
    for hook in hooks:
        hook.remove()
    first, last = seen.values()
    assert first[:3] == [10, 11, 7] and first[3:] == last[3:], "the rest: decode steps"
    assert made == last[:4] == [1, 1, 2, 2]


def test_a_request_waits_for_pages_and_for_a_row_and_nobody_overtakes_it() -> None:
    serving = engine(2, pages=5)
    a = serving.add([1] * 30, max_new_tokens=19, stop_ids=())  # 48 tokens: 3 pages
    big = serving.add([2] * 60, max_new_tokens=5, stop_ids=())  # 64: 4
    small = serving.add([3], max_new_tokens=2, stop_ids=())  # 1
    assert serving.waits_for(a) == "the next step"
    serving.step()
    assert serving.waits_for(a) is None
    assert serving.waits_for(big) == "4 pages of 5: 2 are free"
    assert serving.waits_for(small) == "1 requests that came before"
    assert serving.load() == Load(2, 1, 1, 2)
    assert serving.cancel(a)
    assert serving.waits_for(big) == "the next step"
    serving.step()
    assert serving.load() == Load(0, 2, 0, 0)
    last = serving.add([4], max_new_tokens=2, stop_ids=())
    assert serving.waits_for(last) == "one of 2 rows"
    got = collect(serving)
    assert [len(got[n]) for n in (big, small, last)] == [5, 2, 2]


def test_streams(kv: str) -> None:
    """One drives the engine for all; each sees its own tokens, from its first."""
    tokenizer = Tokenizer.from_directory(TINY)
    serving = engine(2, kv=kv, tokenizer=tokenizer)
    todo = asked(4, 11)
    numbers = [serving.add(text, **options) for text, options in todo]
    for number, (text, options) in reversed(list(zip(numbers, todo, strict=True))):
        single = engine(1, 192, kv=kv, tokenizer=tokenizer)
        want = generate(tiny(), [text], tokenizer=tokenizer, engine=single, **options)
        seen = list(serving.stream(number))
        assert [token.token for token in seen] == want.tokens[0]
        assert "".join(token.text for token in seen) == want.texts[0]
        assert [token.finish for token in seen] == [None] * (len(seen) - 1) + [want.finish[0]]
    assert not serving._requests and not serving.busy
    with pytest.raises(RequestError, match="request 2 is not known, or over"):
        serving.stream(2)


def test_stepping_and_streaming_together(kv: str) -> None:
    serving = engine(2, kv=kv)
    options = {"max_new_tokens": 6, "stop_ids": ()}
    one, other = (serving.add(text, **options) for text in prompts([5, 8], 500))
    stream = serving.stream(one)
    with pytest.raises(RequestError, match="has a stream"):
        serving.stream(one)
    stepped = [token for _ in range(3) for token in serving.step()]
    seen = list(stream)
    assert [t for t in stepped if t.sequence == one] == seen[: sum(t.sequence == one for t in stepped)]
    assert len(seen) == 6 and list(stream) == []
    late = list(serving.stream(other))
    assert len(late) + sum(t.sequence == other for t in stepped) == 6


GOES = [(how, ahead, "paged") for how in ("close", "with", "lost", "lost before its first token") for ahead in (0, 1)]


@pytest.mark.parametrize(
    ("how", "ahead", "kv"), [*GOES, ("close", 1, "bucketed"), ("lost", 0, "bucketed")], indirect=["kv"]
)
def test_a_client_that_goes_away_frees_its_pages(how: str, ahead: bool, kv: str) -> None:
    serving = engine(2, pages=6, kv=kv)
    serving.scheduler.ahead = bool(ahead)
    options = {"max_new_tokens": 40, "stop_ids": ()}
    stays, goes = (serving.add(text, **options) for text in prompts([5, 8], 500))
    waits = serving.add([7] * 3, max_new_tokens=2, stop_ids=())
    stream = serving.stream(goes)
    if how == "with":
        with stream:
            next(stream)
    elif how == "lost before its first token":
        serving.step()
        del stream
    else:
        next(stream)
        if how == "close":
            stream.close()
            stream.close()
        else:
            del stream
    gc.collect()
    assert serving.load().free_pages == 6 - serving.cache.needed(44) and serving.load().free_rows == 1
    got = collect(serving)
    assert serving.load() == Load(0, 0, 2, 6) and waits in got and goes not in got
    rest = [token.token for token in serving.stream(stays)] if stays in serving._requests else []
    want = alone(prompts([5, 8], 500)[0], kv, **options)
    assert (got[stays] == want[-len(got[stays]) :]) and want[: len(rest)] == rest


def test_a_client_that_goes_away_while_it_waits_or_its_prompt_runs(kv: str) -> None:
    serving = engine(1, kv=kv, prefill_chunk=8)
    pages = serving.cache.total
    first, second = (serving.add([5] * 30, max_new_tokens=3, stop_ids=()) for _ in range(2))
    serving.step()  # a piece of the first prompt
    assert serving.load() == Load(1, 1, 0, pages - serving.cache.needed(32))
    serving.stream(second).close()
    serving.stream(first).close()
    assert serving.load() == Load(0, 0, 1, pages) and not serving.busy and serving.step() == []
    last = serving.add([5] * 30, max_new_tokens=3, stop_ids=())
    want = alone([5] * 30, kv, max_new_tokens=3, stop_ids=())
    assert collect(serving) == {last: want}


def test_clients_in_threads(kv: str) -> None:
    serving = engine(3, pages=9, kv=kv)
    todo = asked(8, 21)
    got: list[list[int]] = [[] for _ in todo]

    def client(i: int) -> None:
        text, options = todo[i]
        got[i] = [token.token for token in serving.stream(serving.add(text, **options))]

    threads = [threading.Thread(target=client, args=(i,)) for i in range(len(todo))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert got == [alone(text, kv, **options) for text, options in todo]
    assert serving.load() == Load(0, 0, 3, 9)


REFUSED = {
    "empty": ([], {}, "prompt 0 is empty"),
    "too long for the context": ([1] * 2040, {"max_new_tokens": 9}, "too long for the context.*2040 tokens and 9"),
    "too long for a row": (
        [1] * 90,
        {"max_new_tokens": 7},
        "too long for a row.*90 tokens and 7.*at most 96.*capacity",
    ),
    "too much memory": ([1] * 75, {"max_new_tokens": 6}, "even alone.*take 5 pages.*at most 4 pages.*memory"),
    "text": ("12", {}, "list of token ids; got '12'"),
    "id": ([1, 512], {}, "position 1 of prompt 0.*0 .. 511"),
    "nothing new": ([1], {"max_new_tokens": 0}, "max_new_tokens=0"),
    "temperature": ([1], {"temperature": -1.0}, "temperature"),
    "seed": ([1], {"seed": -1}, "bad seeds"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_refused_and_why(name: str) -> None:
    text, options, words = REFUSED[name]
    serving = engine(3, pages=4)
    with pytest.raises(RequestError, match=words):
        serving.add(text, **{"max_new_tokens": 5, **options})
    assert not serving.busy and serving.step() == []
    with pytest.raises(RequestError, match="not known"):
        serving.stream(0)


def test_too_many_that_wait_are_refused() -> None:
    serving = engine(1, max_waiting=2)
    for _ in range(2):
        serving.add([1], max_new_tokens=2, stop_ids=())
    with pytest.raises(RequestError, match="too many requests wait.*2 that came before.*fewer than 2.*max_waiting"):
        serving.add([1], max_new_tokens=2)
    assert len(serving.step()) == 1
    serving.add([1], max_new_tokens=2, stop_ids=())
    assert sorted(collect(serving)) == [0, 1, 2]


def test_memory() -> None:
    one = PagedCache.page_bytes(tiny().cache_sizes, PAGE)
    serving = engine(8, pages=11)
    held = [kept[:, 1:].nbytes for kept in (serving.cache.k, serving.cache.v)]
    assert sum(held) == 11 * one
    # a request of n tokens keeps n - 1: the last is not fed
    assert [serving.fits(n) for n in (1, 17, 18, 49, 81, 96)] == [8, 8, 5, 3, 2, 1]
    for _ in range(8):
        serving.add([1] * 40, max_new_tokens=9, stop_ids=())
    serving.step()
    assert serving.load() == Load(5, 3, 5, 2)
    assert engine(2, pages=99).cache.total == 12, "no more than its rows can use"
    with pytest.raises(RequestError, match=f"no page.*got {one - 1:,} bytes; expected at least {one:,}"):
        Engine(tiny(), 1, 96, memory=one - 1, page=PAGE)
    for bad in ({"rows": 0}, {"capacity": 0}, {"prefill_chunk": 0}, {"page": 0}, {"page": 48}, {"graphs": True}):
        with pytest.raises(RequestError):
            Engine(tiny(), **{"rows": 1, "capacity": 96, **bad})


def test_a_step_that_failed_is_the_last(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = engine(kv=kv)
    number = serving.add([1], max_new_tokens=2)
    stream = serving.stream(number)
    with monkeypatch.context() as patch:
        patch.setattr(Qwen3Moe, "forward", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError):
            serving.step()
    for call in (serving.step, lambda: serving.add([1]), serving.load, lambda: next(stream)):
        with pytest.raises(RequestError, match="stopped in a step.*no room"):
            call()
    stream.close()
