"""The chat template of a checkpoint: sandboxed Jinja with what templates on the Hub rely on."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ttnn_moe.errors import RequestError
from ttnn_moe.visible import said

from .files import is_failure

MOST = 1 << 24
"""Characters of a conversation, and of what an operator of a template makes."""
LONGEST = 1 << 16
"""Characters of the left side of %."""
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


_WIDTHS = re.compile(r"[%)][-#0 +]*(\d+|\*)?(?:\.(\d+|\*))?")
"""Width and precision of a place of a format, behind its % or its (name)."""


class _Code(CodeGenerator):
    """Calls `joined` for ~, for which Jinja has no hook."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses results of operators that would fill the memory."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _Code

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            size = _formatted(left, right) if isinstance(left, str) else 0.0
        else:
            a, b = _size(left), _size(right)
            size = {"+": a + b, "*": a * b, "**": max(a, 0 if b <= 64 else inf)}[operator]
        _check(operator, size)
        return super().call_binop(context, operator, left, right)

    def joined(self, parts: Iterable[Any]) -> str:
        """The texts of all parts together."""
        texts, size = [], 0
        for part in parts:
            texts.append(str(part))
            size += len(texts[-1])
            _check("~", size)
        return "".join(texts)


def _check(operator: str, size: float) -> None:
    if size > MOST:
        raise TemplateError(f"the result of {operator} is too large")


def _size(value: Any) -> float:
    """A number's absolute value; else the length; 0 of what has none: the operator itself refuses it."""
    return abs(value) if isinstance(value, int | float) else len(value) if hasattr(value, "__len__") else 0


def _formatted(text: str, values: Any) -> float:
    """Characters of text % values, at most: each place takes the longest value, and its width and precision."""
    if len(text) > LONGEST:
        return inf
    given = values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple) else (values,)
    longest = max((len(str(value)) for value in given), default=0)
    star = max((abs(value) for value in given if isinstance(value, int)), default=0)
    widths = (star if width == "*" else float(width) for pair in _WIDTHS.findall(text) for width in pair if width)
    return len(text) + text.count("%") * longest + sum(widths)


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
