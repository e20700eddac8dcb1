"""What fails for one request ends this request with its error; the others get what they get alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from qwen3_checkpoints import TINY, prompts
from ttnn_moe import decoder
from ttnn_moe.decoder import Draw
from ttnn_moe.errors import RequestError
from ttnn_moe.kv.step import PrefillStep
from ttnn_moe.models.qwen3 import Engine, Qwen3Moe, Tokenizer, generate, load_model
from ttnn_moe.models.qwen3.runtime.captured import CapturedRunner
from ttnn_moe.models.qwen3.runtime.engine import Load
from ttnn_moe.models.qwen3.runtime.graphs import Again
from ttnn_moe.models.qwen3.runtime.requests import Request, Token, make_requests
from ttnn_moe.models.qwen3.runtime.scheduler import Chunk, Scheduler
from ttnn_moe.models.qwen3.tokenizer import TextStream

TEXTS = prompts([5, 9, 3], 500)
OPTIONS = {"max_new_tokens": 8, "stop_ids": (), "temperature": 1.2}
BAD = 1


class Fault(Exception):
    pass


@cache
def tiny() -> Qwen3Moe:
    return load_model(TINY, backend="reference", device="cpu", dtype=torch.float32)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(TINY)


def alone(i: int, **options: Any) -> list[int]:
    return generate(tiny(), [TEXTS[i]], seed=i, **{**OPTIONS, **options}).tokens[0]


def text_fails(patch: pytest.MonkeyPatch) -> None:
    """The third piece of the second stream that is made."""
    made: list[TextStream] = []
    pushed: list[int] = []
    init, push = TextStream.__init__, TextStream.push

    def counted(stream: TextStream, *args: Any) -> None:
        init(stream, *args)
        made.append(stream)

    def failing(stream: TextStream, token: int) -> str:
        if stream is made[BAD]:
            pushed.append(token)
            if len(pushed) == 3:
                raise Fault("no text")
        return push(stream, token)

    patch.setattr(TextStream, "__init__", counted)
    patch.setattr(TextStream, "push", failing)


def drawing_fails(patch: pytest.MonkeyPatch) -> None:
    draw = Request.draw

    def failing(request: Request) -> torch.Tensor:
        if request.seed == BAD and request.launched == 2:
            raise Fault("no number")
        return draw(request)

    patch.setattr(Request, "draw", failing)


def choosing_fails(patch: pytest.MonkeyPatch) -> None:
    """For the number that the bad request draws third, in whatever rows it is."""
    draw_tokens = decoder.draw_tokens
    generator = torch.Generator().manual_seed(BAD)
    third = [float(torch.rand((), dtype=torch.float64, generator=generator)) for _ in range(3)][2]

    def failing(logits: torch.Tensor, tokens: torch.Tensor, asked: Sequence[Draw]) -> None:
        if third in [one.uniform for one in asked]:
            raise Fault("no token")
        draw_tokens(logits, tokens, asked)

    patch.setattr(decoder, "draw_tokens", failing)


FAULTS = [text_fails, drawing_fails, choosing_fails]
faults = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)


def serving(ahead: bool = False) -> Engine:
    made = Engine(tiny(), 3, 32, page=16, tokenizer=tokenizer())
    made.scheduler.ahead = ahead
    return made


def check_error(error: RequestError) -> None:
    assert isinstance(error.__cause__, Fault) and "error of its own" in str(error)
    assert None not in (error.got, error.expected, error.remedy)


@faults
@pytest.mark.parametrize("ahead", [False, True])
def test_steps(fault: Any, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    want = [alone(i) for i in range(3)]
    engine, got = serving(ahead), {}
    with monkeypatch.context() as patch:
        fault(patch)
        numbers = [engine.add(text, seed=i, **OPTIONS) for i, text in enumerate(TEXTS)]
        while engine.busy:
            for token in engine.step():
                got.setdefault(token.sequence, []).append(token)
    tokens: list[list[Token]] = [got[number] for number in numbers]
    for i in (0, 2):
        assert [token.token for token in tokens[i]] == want[i] and tokens[i][-1].finish == "length"
    *before, last = tokens[BAD]
    assert [token.token for token in before] == want[BAD][:2]
    assert last.finish == "error" and last.token == -1 and last.error is not None
    check_error(last.error)
    assert engine.load() == Load(0, 0, 3, engine.cache.total) and not engine._requests
    again = engine.add(TEXTS[BAD], seed=BAD, **OPTIONS)
    assert [token.token for token in engine.stream(again)] == want[BAD]


def test_the_first_of_two_failures_ends_a_request() -> None:
    """A step is launched ahead: its failure comes before the host reads the token of the one before."""
    (request,) = make_requests(tiny().config, [TEXTS[0]], max_new_tokens=5, stop_ids=())
    for request.launched, error in ((1, Fault("first")), (2, Fault("second"))):
        request.fail(error)
    assert request.take(7) == Token(0, 7)
    ended = request.take(8)
    assert ended.finish == "error" and ended.error is not None and str(ended.error.__cause__) == "first"


@faults
def test_streams(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    want = [alone(i) for i in range(3)]
    engine = serving()
    with monkeypatch.context() as patch:
        fault(patch)
        streams = [engine.stream(engine.add(text, seed=i, **OPTIONS)) for i, text in enumerate(TEXTS)]
        assert [token.token for token in streams[0]] == want[0]
        with pytest.raises(RequestError) as error:
            list(streams[BAD])
        check_error(error.value)
        assert list(streams[BAD]) == []
        assert [token.token for token in streams[2]] == want[2]
    assert engine.load() == Load(0, 0, 3, engine.cache.total)


@faults
@pytest.mark.parametrize("reader", ["steps", "steps and a stream"])
def test_a_kept_token_holds_its_error_but_no_engine(fault: Any, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, kept = serving(), []
    with monkeypatch.context() as patch:
        fault(patch)
        numbers = [engine.add(text, seed=i, **OPTIONS) for i, text in enumerate(TEXTS)]
        stream = engine.stream(numbers[BAD])
        while engine.busy:
            kept += [token for token in engine.step() if token.finish == "error"]
    if reader != "steps":
        with pytest.raises(RequestError):
            list(stream)
    cache = weakref.ref(engine.cache)
    gc.disable()
    try:
        del engine, stream
        assert cache() is None
    finally:
        gc.enable()
    check_error(kept[0].error)


@faults
def test_generate(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = serving()
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises(RequestError) as error:
            generate(tiny(), TEXTS, seed=0, engine=engine, tokenizer=tokenizer(), **OPTIONS)
        check_error(error.value)
    assert engine.load() == Load(0, 0, 3, engine.cache.total) and not engine.busy
    got = generate(tiny(), TEXTS, seed=0, engine=engine, tokenizer=tokenizer(), **OPTIONS)
    assert got.tokens == [alone(i) for i in range(3)]


@pytest.mark.parametrize("kind", [Fault, KeyboardInterrupt])
def test_what_on_token_raises_ends_its_own_call(kind: type[BaseException]) -> None:
    """And nobody else's requests; the error is the caller's, as it was raised."""
    engine, seen = serving(), []
    numbers: list[int] = []

    def on_token(token: Token) -> None:
        seen.append(token)
        if not numbers:  # beside the generation
            numbers.append(engine.add(TEXTS[2], seed=2, **OPTIONS))
        if len(seen) == 4:
            raise kind("enough")

    with pytest.raises(kind, match="enough") as error:
        generate(tiny(), TEXTS[:2], seed=0, engine=engine, on_token=on_token, **OPTIONS)
    assert engine.load().free_rows == 3 - engine.load().running and engine.load().running <= 1
    assert [token.token for token in engine.stream(numbers[0])] == alone(2)
    assert engine.load() == Load(0, 0, 3, engine.cache.total)
    del error


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("many", [True, False], ids=["all logits", "one logit"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("token", [0, 2], ids=["first token", "third token"])
def test_logits_of_nan_end_their_request(
    temperature: float, many: bool, graphs: bool, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**OPTIONS, "temperature": temperature}
    want = [alone(i, **options) for i in range(3)]
    engine, got = serving(), {}
    if graphs:
        engine.runner = CapturedRunner(engine.model, engine.cache, Chunk(256, 256), Again())
        engine.scheduler = Scheduler(engine.runner, engine.cache, Chunk(256, 256))
    forward = Qwen3Moe.forward

    def damaged(model: Qwen3Moe, ids: torch.Tensor, cache: Any, step: Any) -> torch.Tensor:
        logits, at = forward(model, ids, cache, step), step.positions
        assert 0 <= int(ids.min()) and int(ids.max()) < model.config.vocab_size, "each token that is fed is an id"
        last, rows = len(TEXTS[BAD]) - 1 + token, step.rows
        if isinstance(step, PrefillStep):
            at, rows = at[step.logits_at], rows[step.logits_at]
        bad = ((rows == BAD) & (at >= last))[:, None]
        return logits.masked_fill(bad if many else bad & (torch.arange(logits.shape[1]) == 77), float("nan"))

    monkeypatch.setattr(Qwen3Moe, "forward", damaged)
    numbers = [engine.add(text, seed=i, **options) for i, text in enumerate(TEXTS)]
    while engine.busy:
        for event in engine.step():
            got.setdefault(event.sequence, []).append(event)
    tokens = [got[number] for number in numbers]
    for i in (0, 2):
        assert [event.token for event in tokens[i]] == want[i]
    *before, last = tokens[BAD]
    assert [event.token for event in before] == want[BAD][:token]
    assert last.finish == "error" and last.token == -1 and "NaN among the logits" in str(last.error)
    assert engine.load() == Load(0, 0, 3, engine.cache.total)


@pytest.mark.parametrize("kind", [Fault, KeyboardInterrupt])
def test_an_engine_that_stopped_frees_its_memory(kind: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: a garbage collection may come late, and the engine that takes its place needs the memory."""

    def failing(*args: Any) -> None:
        raise kind("no step")

    engine = serving()
    engine.add(TEXTS[0], **OPTIONS)
    engine.step()
    monkeypatch.setattr(Qwen3Moe, "forward", failing)
    gc.disable()
    try:
        with pytest.raises(kind, match="no step") as error:
            engine.step()
        del error
        with pytest.raises(RequestError, match="no step") as refused:
            engine.step()
        del refused
        cache = weakref.ref(engine.cache)
        del engine
        assert cache() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [Fault, KeyboardInterrupt])
def test_a_request_that_cannot_be_ended_stops_the_engine(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row would be lost in silence."""

    def failing(*args: Any) -> None:
        raise kind("not closed")

    engine = serving()
    number = engine.add(TEXTS[0], **OPTIONS)
    engine.step()
    monkeypatch.setattr(engine.cache, "close", failing)
    with pytest.raises(kind, match="not closed"):
        engine.cancel(number)
    with pytest.raises(RequestError, match="not closed"):
        engine.add(TEXTS[1], **OPTIONS)
