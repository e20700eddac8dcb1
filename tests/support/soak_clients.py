"""Clients of the soak's engine: a server that steps it, and clients that read streams, die, and cancel each other."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

from soak_checks import Book, Outcome
from soak_requests import Ask, Fault, FaultyTokenizer, draw
from ttnn_moe.errors import RequestError
from ttnn_moe.models.qwen3 import Engine, generate

STUCK, SECONDS = 5000, 120
"""Steps, and seconds of a thread, after which a round that does not end is stuck."""


class Killed(Exception):
    """The end of a client."""


def add(engine: Engine, ask: Ask, book: Book) -> int | None:
    """The number of a request; None: it was refused."""
    if isinstance(engine.tokenizer, FaultyTokenizer):
        engine.tokenizer.plan(ask.fails)
    try:
        number = engine.add(ask.prompt, **ask.options)
    except RequestError as error:
        book.refused(ask, error)
        return None
    if ask.kind != "good":
        book.problem(f"taken, and should not be: {ask}")
    book.count("requests taken")
    return number


def asked(engine: Engine, rng: random.Random) -> Ask:
    made = draw(rng, engine.model.config.vocab_size, engine.capacity)
    return made if engine.tokenizer is not None else Ask(made.prompt, made.options, made.kind)


def step_server(engine: Engine, rng: random.Random, book: Book, actions: int) -> None:
    """Adds, steps and cancels at random, then steps until nothing is left."""
    open_: dict[int, Outcome] = {}

    def step() -> None:
        book.count("steps")
        for token in engine.step():
            open_[token.sequence].take(token)
            if token.finish is not None:
                del open_[token.sequence]

    for _ in range(actions):
        what = rng.random()
        if what < 0.45:
            number = add(engine, ask := asked(engine, rng), book)
            if number is not None:
                open_[number] = Outcome(ask)
                book.outcomes.append(open_[number])
        elif what < 0.9:
            for _ in range(rng.randint(1, 5)):
                step()
        elif open_:
            number = rng.choice(list(open_))
            del open_[number]
            if rng.random() < 0.5:
                engine.stream(number)  # lost at once
            elif not engine.cancel(number):
                book.problem(f"request {number} was not known")
    for _ in range(STUCK):
        if not engine.busy:
            return
        step()
    book.problem(f"{len(open_)} requests never ended")


def client(engine: Engine, rng: random.Random, book: Book, requests: int) -> Iterator[None]:
    """Some requests, one after the other, read as streams; it yields between its actions.

    Raises:
        Killed: it dies with a stream in its hands.
    """
    for _ in range(requests):
        yield
        number = add(engine, ask := asked(engine, rng), book)
        if number is None:
            continue
        outcome = Outcome(ask)
        book.outcomes.append(outcome)
        for _ in range(rng.choice([0, 0, 3])):
            yield
        if rng.random() < 0.1:  # anybody's
            victim = rng.randint(0, number)
            book.cancelled.add(victim)
            engine.cancel(victim)
        limit = rng.randint(0, 6) if rng.random() < 0.3 else None
        try:
            stream = engine.stream(number)
            while limit is None or len(outcome.tokens) < limit:
                token = next(stream, None)
                if token is None:
                    break
                outcome.take(token)
                yield
        except RequestError as error:
            if isinstance(error.__cause__, Fault):
                outcome.error = error
            elif number not in book.cancelled:
                book.problem(f"a stream failed: {error}")
            continue
        if limit is None:
            if outcome.finish is None and number not in book.cancelled:
                book.problem(f"request {number} ended without a reason: {ask}")
        elif rng.random() < 0.4:
            stream.close()
        elif rng.random() < 0.5:
            del stream
        else:
            raise Killed


def interleaved(engine: Engine, rng: random.Random, book: Book, clients: int) -> None:
    """Clients in one thread, which take turns at random; some stop for ever between two tokens."""
    alive = [client(engine, random.Random(rng.random()), book, rng.randint(1, 5)) for _ in range(clients)]
    while alive:
        one = rng.choice(alive)
        try:
            next(one)
        except Killed:
            book.count("clients killed")
            alive.remove(one)
        except StopIteration:
            alive.remove(one)
        else:
            if rng.random() < 0.005:
                one.close()
                book.count("clients killed")
                alive.remove(one)
        del one


def threads(engine: Engine, rng: random.Random, book: Book, clients: int) -> None:
    """Clients in threads."""

    def run(one: Iterator[None]) -> None:
        try:
            for _ in one:
                pass
        except Killed:
            book.count("clients killed")
        except BaseException as error:
            book.problem(f"a client's thread failed: {error!r}")

    own = [random.Random(rng.random()) for _ in range(clients)]
    running = [
        threading.Thread(target=run, args=(client(engine, one, book, one.randint(1, 5)),), daemon=True) for one in own
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(SECONDS)
        if thread.is_alive():
            book.problem("a client waits for ever")


def callback_that_raises(engine: Engine, rng: random.Random, book: Book) -> None:
    """On an idle engine: generate ends with the error of its callback."""
    left = rng.randint(1, 5)

    def on_token(_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Fault("on_token")

    try:
        generate(engine.model, [[1, 2]], max_new_tokens=8, stop_ids=(), engine=engine, on_token=on_token)
        book.problem("the error of a callback was lost")
    except Fault:
        book.count("callbacks that raised")
