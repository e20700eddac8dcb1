"""The engine on a CPU: pages, rows, requests that come and go, memory."""

from __future__ import annotations

import random
import time
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3_checkpoints import prompts
from tiny_engines import PAGE, alone, asked, collect, engine, tiny
from ttnn_moe.errors import RequestError
from ttnn_moe.kv.bucketed import allocation
from ttnn_moe.kv.bucketed.cache import BucketedCache
from ttnn_moe.kv.paged import PagedCache
from ttnn_moe.kv.pages import PagePool
from ttnn_moe.models.qwen3 import Engine, Qwen3Moe
from ttnn_moe.models.qwen3.runtime import limits
from ttnn_moe.models.qwen3.runtime.engine import Load
from ttnn_moe.models.qwen3.runtime.requests import Stats


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
    with pytest.raises(
        RequestError, match="does not fit the KV cache.*at most 32; to fix it: open the row for 33 tokens"
    ):
        cache.prefill([(0, 5), (2, 33)], [])
    with pytest.raises(RequestError, match="at most 0; to fix it: open the row for 7 tokens"):
        cache.prefill([(1, 7)], [])
    assert cache.lengths == [0] * 4, "a step that is refused has grown no row"
    cache.close(0)
    cache.open(1, 48)
    assert sorted(cache.table[1].tolist()) == sorted(used[:3])
    assert cache.prefill([(1, 20)], []).bound == 20 and cache.prefill([(2, 5)], [], [(1, 20)]).bound == 21
    assert cache.prefill([(1, 28)], [], [(2, 5)]).bound == 48 and cache.lengths == [0, 48, 5, 0]
    assert cache.decode([1, 2], [47, 5]).bound == cache.prefill([], [], [(1, 47), (2, 5)]).bound == 48
    with pytest.raises(RequestError, match="got 48 tokens and 1 more; expected at most 48; to fix it: make .* larger"):
        cache.decode([2, 1], [5, 48])
    # the page table has 0 there: the dummy page would take the token
    for step in (partial(cache.prefill, [(2, 1)], []), partial(cache.stage, [(2, 1)])):
        with pytest.raises(RequestError, match="sequence 1 .*got 48 tokens and 1 more; expected at most 48"):
            step(decoding=[(1, 48)])
    assert cache.lengths == [0, 48, 5, 0]
    for name, wrong in (("page", 24), ("page", 8), ("pages", 0), ("rows", 0), ("capacity", 0), ("capacity", 2**31)):
        with pytest.raises(RequestError, match=f"; got {name}={wrong}; "):
            PagedCache(tiny().cache_sizes, **{"rows": 1, "capacity": 16, "pages": 1, name: wrong})


def test_a_device_gets_the_table_after_rows_opened() -> None:
    cache = PagedCache(tiny().cache_sizes, 3, 40, 5, PAGE)
    cache._table = cache._host.clone()  # as on a device
    for row, tokens in ((0, 33), (2, 17)):
        cache.open(row, tokens)
        assert cache.table[row].count_nonzero() == cache.needed(tokens)


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


def test_a_long_prompt_goes_in_larger_pieces_while_nobody_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CPU_STEP", 10)
    monkeypatch.setattr(limits, "CPU_ALONE", 40)
    serving, fed = engine(4, 400, prefill_chunk=None), []
    prefill = serving.runner.prefill
    monkeypatch.setattr(serving.runner, "prefill", lambda p, *more: fed.append(len(p.ids)) or prefill(p, *more))
    todo = [(text, {"max_new_tokens": 3, "stop_ids": ()}) for text in prompts([95, 3, 4, 95, 25], 500)]

    def steps(*which: int) -> list[int]:
        """Prompt tokens of the steps of these requests, which get what they get alone."""
        fed.clear()
        numbers = [serving.add(todo[i][0], **todo[i][1]) for i in which]
        got = collect(serving)
        assert [got[n] for n in numbers] == [alone(todo[i][0], **todo[i][1]) for i in which]
        return fed.copy()

    assert steps(0) == [40, 40, 15]
    assert steps(0, 3) == [40, 40, 15, 10, 10, 40, 35], "the first one decodes for two steps"
    assert steps(1, 4) == [10, 10, 8], "a short prompt is not kept waiting by those behind it"
    assert steps(1, 2, 0) == [10, 10, 10, 40, 32]
    assert steps(4, 1) == [25, 3]


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


@pytest.mark.parametrize(("ahead", "made"), [(False, [1, 1, 2, 2, 1]), (True, [1, 0, 1, 2, 2, 1])])
def test_a_step_ahead_is_the_only_one_under_way(ahead: bool, made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step runs ahead of the tokens of one step before, except of a first prompt's. A step of prompts is no decode
    step."""
    serving, steps = engine(2, prefill_chunk=10), []
    scheduler = serving.scheduler
    scheduler.ahead = ahead  # as with graphs
    step = scheduler.step
    monkeypatch.setattr(scheduler, "step", lambda: steps.append(step()) or steps[-1])
    serving.add([1] * 4, max_new_tokens=4, stop_ids=())
    tokens = [len(serving.step()), len(serving.step())]
    serving.add([2] * 5, max_new_tokens=3, stop_ids=())
    while serving.busy:
        tokens.append(len(serving.step()))
        assert len(scheduler.launched) <= ahead
    assert tokens == made
    assert [one.decoding for finished in steps for one in finished] == [False, True, False, True, True]


@pytest.mark.parametrize(("n", "made"), [(12, [0, 2]), (36, [0, 1, 0, 1])])
def test_no_token_is_kept_back_for_a_step_that_makes_none(n: int, made: list[int]) -> None:
    """The first prompt's only token waits while more of the second one's n tokens can be launched, for one step."""
    serving = engine(2, prefill_chunk=10)
    serving.scheduler.ahead = True  # as with graphs
    for text in ([1] * 4, [2] * n):
        serving.add(text, max_new_tokens=1, stop_ids=())
    assert [len(serving.step()) for _ in made] == made and not serving.busy


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
    whole = serving.add([5] * 76, max_new_tokens=5, stop_ids=())  # 80: all pages
    assert serving.waits_for(whole) == "the next step"
    assert len(collect(serving)[whole]) == 5


def test_a_step_counts_the_time_of_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the model runs in it."""
    forward = Qwen3Moe.forward
    monkeypatch.setattr(Qwen3Moe, "forward", lambda *args: [time.sleep(0.02), forward(*args)][1])
    serving = engine(1)
    serving.add([5], max_new_tokens=4, stop_ids=())
    collect(serving)
    assert serving.stats.decode_steps == 3 and serving.stats.decode_s >= 3 * 0.02


def test_the_figures_of_processes_side_by_side() -> None:
    """Sums of tokens; the time until all have a first token; steps and time of the one that decoded longest."""
    one, other = Stats(10, 20, 0.5, 4.0, 16, 8), Stats(1, 2, 0.75, 3.0, 12, 9)
    assert Stats.together([one, other]) == Stats.together([other, one]) == Stats(11, 22, 0.75, 4.0, 28, 8)


def test_memory() -> None:
    one = PagedCache.page_bytes(tiny().cache_sizes, PAGE)
    serving = engine(8, pages=11)
    held = [kept[:, 1:].nbytes for kept in (serving.cache.k, serving.cache.v)]
    assert sum(held) == 11 * one
    # a request of n tokens keeps n - 1: the last is not fed
    assert [serving.fits(n) for n in (1, 17, 18, 49, 81, 96, 97)] == [8, 8, 5, 3, 2, 1, 0]
    for _ in range(8):
        serving.add([1] * 40, max_new_tokens=9, stop_ids=())
    serving.step()
    assert serving.load() == Load(5, 3, 5, 2)
    assert engine(2, pages=99).cache.total == 12, "no more than its rows can use"
    with pytest.raises(RequestError, match=f"no page.*got {one - 1:,} bytes; expected at least {one:,}"):
        Engine(tiny(), 1, 96, memory=one - 1, page=PAGE)
    assert Engine(tiny(), 1, 96, memory=one, page=PAGE).cache.total == 1
    for bad in ({"rows": 0}, {"capacity": 0}, {"prefill_chunk": 0}, {"page": 0}, {"page": 48}, {"graphs": True}):
        with pytest.raises(RequestError):
            Engine(tiny(), **{"rows": 1, "capacity": 96, **bad})
