"""An engine of one rank among ranks that share the experts."""

from __future__ import annotations

from collections.abc import Callable

from ..runtime.engine import Engine
from ..runtime.requests import Token
from .experts import ExpertsQwen3


def serve(engine: Engine, more: Callable[[], bool], on_token: Callable[[Token], object]) -> None:
    """Step this rank's engine while requests come; between and after them, run its experts for the other ranks.

    Returns when no rank has a request, and none expects any. Call it inside Ranks.watched: an error in a step ends all
    ranks. What fails for one request, or cancels it, ends this request only.

    Args:
        engine: of an ExpertsQwen3. Another thread may add and cancel requests.
        more: called before each step; it may add requests. False: this rank expects no more, and it is not asked again.
        on_token: gets every token, and every request's error, as Engine.step gives them.
    """
    model = engine.model
    assert isinstance(model, ExpertsQwen3)
    coming = True
    while True:
        coming = coming and more()
        if engine.busy:
            for token in engine.step():
                on_token(token)
        elif not model.idle(coming):
            return
