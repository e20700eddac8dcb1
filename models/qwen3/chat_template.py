"""The chat template of a checkpoint: sandboxed Jinja with what templates on the Hub rely on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ttnn_moe.errors import RequestError

from .files import is_failure, said

MOST = 1 << 24
"""Characters of a conversation, and of what an operator of a template makes."""
SECONDS = 10.0
"""That a conversation may take."""


class ChatTemplate:
    """A template that turns messages into a prompt. It is foreign code.

    Args:
        text: Jinja. source: where it comes from, as errors name it.

    Raises:
        RequestError: from both methods, for whatever goes wrong in the template.
    """

    def __init__(self, text: str, source: str | Path):
        self._source = source
        try:
            self._template = _environment().from_string(text)
        except BaseException as error:
            raise self._error(error) from error

    def render(self, **variables: Any) -> str:
        """The text that the template makes of its variables.

        Raises:
            RequestError: the template fails, takes more than SECONDS, or writes more than MOST characters.
        """
        try:
            pieces, length = [], 0
            with _timed():
                for piece in self._template.generate(variables):
                    length += len(piece)
                    if length > MOST:
                        raise ValueError(f"a conversation of more than {MOST} characters")
                    pieces.append(piece)
            text = "".join(pieces)
            text.encode()  # a template can write lone surrogates
            return text
        except BaseException as error:
            raise self._error(error) from error

    def _error(self, error: BaseException) -> BaseException:
        if not is_failure(error):
            return error
        return RequestError(f"the chat template of {self._source} refuses these messages", got=said(error))


@contextmanager
def _timed() -> Iterator[None]:
    """Raise TimeoutError in the block after SECONDS, at its next line of Python. A debugger has precedence."""
    if sys.gettrace() is not None:
        yield
        return
    end = time.monotonic() + SECONDS

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"it takes more than {SECONDS:g} s")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses sums, products and powers that would fill the memory."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        a, b = _size(left), _size(right)
        if {"+": a + b > MOST, "*": a * b > MOST, "**": a > MOST or b > 64}[operator]:
            raise TemplateError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> float:
    """A number's absolute value; else the length."""
    return abs(value) if isinstance(value, int | float) else len(value)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class _GenerationBlock(Extension):
    """{% generation %} ... {% endgeneration %}: marks the assistant's text for training; rendered as is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML, which no prompt wants
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
