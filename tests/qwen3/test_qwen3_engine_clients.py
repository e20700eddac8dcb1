"""The engine's clients on a CPU: streams, threads, those that go away, what is refused."""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from processes import run_python
from qwen3_checkpoints import TINY, prompts
from tiny_engines import alone, asked, collect, engine, tiny
from ttnn_moe.errors import ContractError, RequestError
from ttnn_moe.kv.paged import PagedCache
from ttnn_moe.models.qwen3 import Engine, Qwen3Moe, Tokenizer, generate, stream
from ttnn_moe.models.qwen3.runtime.engine import Load
from ttnn_moe.models.qwen3.runtime.requests import check_request


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


def test_the_chunk_of_a_call_is_this_calls() -> None:
    """Also where its generator was not read to its end, and where another call comes meanwhile."""
    serving = engine(2, prefill_chunk=24)
    (text,) = prompts([20], 500)

    def steps(**options: int) -> int:
        """Prompt steps of a call."""
        filled = []
        fill = serving.scheduler._fill
        serving.scheduler._fill = lambda: filled.append(1) or fill()  # type: ignore[method-assign]
        generate(tiny(), [text], engine=serving, max_new_tokens=2, stop_ids=(), **options)
        serving.scheduler._fill = fill  # type: ignore[method-assign]
        return len(filled)

    open_ = stream(tiny(), [text], engine=serving, prefill_chunk=3, max_new_tokens=1, stop_ids=())
    next(open_)
    assert steps(prefill_chunk=5) == 4 and steps() == 1
    open_.close()
    assert steps(prefill_chunk=5) == 4
    number = serving.add(text, max_new_tokens=1, stop_ids=())
    assert [token.sequence for token in serving.step()] == [number], "one step"


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


@pytest.mark.parametrize("ended", ["going on", "over", "in an engine that stopped"])
def test_a_closed_stream_ends(ended: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where steps of others have made tokens that nobody read."""
    serving = engine(2)
    number = serving.add([5], max_new_tokens=3 if ended == "over" else 9, stop_ids=())
    mine = serving.stream(number)
    for _ in range(4):
        serving.step()
    next(mine)
    if ended == "in an engine that stopped":
        with monkeypatch.context() as patch:
            patch.setattr(Qwen3Moe, "forward", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
            with pytest.raises(MemoryError):
                serving.step()
    mine.close()
    assert list(mine) == []


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


def test_a_stream_that_waits_for_its_first_token_keeps_nobody_from_the_engine(kv: str) -> None:
    """It drives the engine meanwhile, for one that gets its tokens as they come."""
    serving = engine(1, kv=kv)
    runs, waits = (serving.add([5] * 3, max_new_tokens=80, stop_ids=()) for _ in range(2))
    first = serving.stream(runs)
    next(first)
    other = threading.Thread(target=lambda late: next(late, None), args=(serving.stream(waits),))
    other.start()
    while serving.stats.new_tokens < 3:
        time.sleep(1e-3)
    next(first)
    assert serving.waits_for(waits) == "one of 1 rows"
    for number in (runs, waits):
        serving.cancel(number)
    other.join(60)
    assert not other.is_alive()


PLACES = {
    "rows are given": (PagedCache, "open"),
    "a step is planned": (PagedCache, "prefill"),
    "the model runs": (Qwen3Moe, "forward"),
}


def within_a_step(place: str, patch: pytest.MonkeyPatch, call: Callable[[], object]) -> list[object]:
    """Call it once within the next step, as a signal handler would; what it returns."""
    owner, name = PLACES[place]
    real, results = getattr(owner, name), []

    def interrupted(*args: Any) -> Any:
        if not results:
            results.append(call())
        return real(*args)

    patch.setattr(owner, name, interrupted)
    return results


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("victim", [0, 1, 2], ids=["runs", "runs, too", "waits"])
def test_a_signal_handler_cancels_a_request(place: str, victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = engine(2, prefill_chunk=8)
    options = {"max_new_tokens": 4, "stop_ids": ()}
    texts = prompts([12, 9, 5], 500)
    numbers = [serving.add(text, **options) for text in texts]
    done = within_a_step(place, monkeypatch, lambda: serving.cancel(numbers[victim]))
    serving.step()
    assert done == [True] and not serving.cancel(numbers[victim])
    got = collect(serving)
    for number, text in zip(numbers, texts, strict=True):
        if number != numbers[victim]:
            assert got[number] == alone(text, **options)
    assert numbers[victim] not in got and serving.load() == Load(0, 0, 2, serving.cache.total)


@pytest.mark.parametrize("place", PLACES)
def test_a_signal_handler_closes_the_engine(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the step."""
    serving = engine(2)
    serving.add([5], max_new_tokens=4, stop_ids=())
    done = within_a_step(place, monkeypatch, serving.close)
    assert len(serving.step()) == 1 == len(done)
    with pytest.raises(RequestError, match="engine is closed"):
        serving.step()
    assert serving.cache.free == serving.cache.total


@pytest.mark.parametrize("call", ["step", "capture", "next"])
def test_a_step_within_a_step_is_refused(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = engine(2)
    mine = serving.stream(serving.add([5], max_new_tokens=4, stop_ids=()))

    def again() -> None:
        with pytest.raises(RequestError, match="within a step; got .*; expected a call between steps; to fix it"):
            {"step": serving.step, "capture": serving.capture, "next": lambda: next(mine)}[call]()

    within_a_step("the model runs", monkeypatch, again)
    assert [token.token for token in mine] == alone([5], max_new_tokens=4, stop_ids=())


FORK = """
import os, signal, threading
from tiny_engines import engine
from ttnn_moe.errors import ContractError, RequestError
from ttnn_moe.models.qwen3 import Qwen3Moe

busy, idle = engine(1), engine(1)
busy.add([5], max_new_tokens=2, stop_ids=())
within, over = threading.Event(), threading.Event()
forward = Qwen3Moe.forward
Qwen3Moe.forward = lambda *args: [within.set(), over.wait(), forward(*args)][2]
thread = threading.Thread(target=busy.step)
thread.start()
within.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        busy.load()
    except RequestError as error:
        os._exit(7 if "got a fork of the process" in str(error) and idle.load().free_rows == 1 else 8)
    os._exit(9)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
over.set()
thread.join()
assert code == 7 and busy.load().running == 1, code
"""


@pytest.mark.slow(12)
def test_a_child_process_does_not_wait_for_a_step_that_its_parent_runs() -> None:
    run_python("-c", FORK)


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


def test_a_prompt_as_long_as_the_context_is_taken() -> None:
    assert tiny().config.max_position_embeddings == 2048
    (ids,) = check_request(tiny().config, [[1] * 2040], 8)
    assert len(ids) == 2040


def test_too_many_that_wait_are_refused() -> None:
    serving = engine(1, max_waiting=2)
    for _ in range(2):
        serving.add([1], max_new_tokens=2, stop_ids=())
    with pytest.raises(RequestError, match="too many requests wait.*2 that came before.*fewer than 2.*max_waiting"):
        serving.add([1], max_new_tokens=2)
    assert len(serving.step()) == 1
    serving.add([1], max_new_tokens=2, stop_ids=())
    assert sorted(collect(serving)) == [0, 1, 2]


def test_a_call_may_have_as_many_prompts_as_rows_and_those_that_may_wait() -> None:
    serving = engine(2, max_waiting=1)
    options = {"engine": serving, "max_new_tokens": 1, "stop_ids": ()}
    assert len(generate(tiny(), [[1]] * 3, **options).tokens) == 3
    with pytest.raises(RequestError, match="would wait; got 4 prompts for 2 rows; expected at most 3"):
        generate(tiny(), [[1]] * 4, **options)
    assert not serving.busy


def test_a_cache_has_one_engine_at_a_time(kv: str) -> None:
    first = engine(kv=kv)
    with pytest.raises(RequestError, match="in use.*got the cache of another engine.*close that engine"):
        Engine(tiny(), cache=first.cache)
    (text,) = prompts([20], 500)
    for _ in range(2):
        first.add(text, max_new_tokens=5, stop_ids=())
    first.step()
    cache = first.cache
    first.close()
    second = Engine(tiny(), cache=cache, prefill_chunk=500)
    first.close()
    with pytest.raises(RequestError, match="in use"):
        Engine(tiny(), cache=cache)
    number = second.add(text, max_new_tokens=5, stop_ids=())
    assert collect(second) == {number: alone(text, kv, max_new_tokens=5, stop_ids=())}
    del second
    Engine(tiny(), cache=cache)


def test_an_engine_that_was_not_made_has_no_cache() -> None:
    cache = tiny().new_cache(2, 64)
    with pytest.raises(RequestError) as kept:
        Engine(tiny(), cache=cache, graphs=True)
    Engine(tiny(), cache=cache)
    del kept


def test_weights_of_another_dtype_wait_until_they_are_changed_back() -> None:
    network = copy.deepcopy(tiny())
    served = Engine(network, 2, 64)
    number = served.add([70, 71], max_new_tokens=3, stop_ids=())
    network.half()
    with pytest.raises(ContractError, match=r"weights do not fit .*; got torch.float16 on cpu; expected torch.float32"):
        served.step()
    network.float()
    assert len([*served.stream(number)]) == 3


def test_a_closed_engine_refuses_every_call() -> None:
    serving = engine(2)
    ended, open_, waits = (serving.add([1 + i], max_new_tokens=1 + i, stop_ids=()) for i in range(3))
    done, cut, later = map(serving.stream, (ended, open_, waits))
    serving.step()
    serving.close()
    assert serving.cache.free == serving.cache.total
    calls = (serving.step, lambda: serving.add([1]), serving.load, lambda: serving.busy, serving.capture)
    for call in (*calls, lambda: serving.stream(open_), lambda: next(later)):
        with pytest.raises(RequestError, match="engine is closed"):
            call()
    assert len(list(done)) == 1, "what was made before, of a request that had ended"
    with pytest.raises(RequestError, match="engine is closed"):
        list(cut)
    assert not serving.cancel(open_)
    for one in (done, cut, later):
        one.close()


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
