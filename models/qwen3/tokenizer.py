"""The tokenizer of a checkpoint: text <-> ids, the chat template, and text that arrives token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from ttnn_moe.errors import CheckpointError, RequestError

from .config import read_json

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_UNFINISHED = "\ufffd"


class Tokenizer:
    """A fast tokenizer with its chat template, without transformers.

    Attributes:
        special_tokens: name ("eos_token", ...) -> text, as chat templates see them.
        chat_template: Jinja source, or None.
    """

    def __init__(
        self, fast: FastTokenizer, special_tokens: Mapping[str, str] | None = None, chat_template: str | None = None
    ):
        self.fast = fast
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja (the last two may be absent).

        Raises:
            CheckpointError: no tokenizer.json, or a file that cannot be read.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{directory} has no tokenizer.json", remedy="fetch the tokenizer files of the checkpoint"
            )
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(f"{path} cannot be read", got=str(error)) from error
        fast.no_truncation()
        fast.no_padding()
        path = directory / "tokenizer_config.json"
        config = read_json(path) if path.is_file() else {}
        _add_missing_tokens(fast, config.get("added_tokens_decoder") or {})
        special = {name: text for name in _SPECIAL if (text := _content(config.get(name))) is not None}
        return cls(fast, special, _template(directory, config))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """ids of a text; special tokens written in it are recognised."""
        return self.fast.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for one sequence whose tokens come one at a time."""
        return TextStream(self, skip_special_tokens)

    @cached_property
    def eos_token_id(self) -> int | None:
        text = self.special_tokens.get("eos_token")
        return None if text is None else self.fast.token_to_id(text)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render a conversation with the checkpoint's template.

        Args:
            messages: objects with "role" and "content".
            add_generation_prompt: end with the header of the assistant's turn.
            tools: JSON schemas of callable tools.
            **variables: further template variables ("enable_thinking", ...).

        Returns:
            Text to encode with add_special_tokens=False.

        Raises:
            RequestError: no messages, no template, or one that refuses these messages.
        """
        if not messages:
            raise RequestError("a conversation needs at least one message", got="none")
        if self.chat_template is None:
            raise RequestError("this checkpoint has no chat template", remedy="give the text as it is (--no-chat)")
        try:
            return self._compiled.render(
                messages=[{k: v for k, v in message.items() if v is not None} for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                **{**self.special_tokens, **variables},
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError("the chat template refuses these messages", got=str(error)) from error

    @cached_property
    def _compiled(self) -> Any:
        # what templates on the Hub rely on; sandboxed, since they are foreign code
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        return environment.from_string(self.chat_template or "")


class TextStream:
    """Turns one sequence's tokens into pieces of text whose concatenation is the decoded whole.

    Bytes of a character that is not complete yet are held back.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        # the caller has the text of `_before`; it stays as context: some decoders treat the first token apart
        self._before: list[int] = []
        self._pending: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that this token completes; often a word, sometimes nothing."""
        self._pending.append(token)
        text = self._new_text()
        if not text.endswith(_UNFINISHED):
            piece = text[self._shown :]
            self._before, self._pending, self._shown = self._pending, [], 0
            return piece
        # where bytes are missing, only the last replacement character can still change
        piece = text[self._shown : -1]
        self._shown = len(text) - 1
        return piece

    def finish(self) -> str:
        """What is left when no token follows."""
        piece = self._new_text()[self._shown :]
        self._before, self._pending, self._shown = self._pending, [], 0
        return piece

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._before, self._skip)
        return self._tokenizer.decode(self._before + self._pending, self._skip)[len(before) :]


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


def _content(token: Any) -> str | None:
    """A token as tokenizer_config.json writes it: text, or an object with its content."""
    value = token.get("content") if isinstance(token, Mapping) else token
    return value if isinstance(value, str) else None


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read", got=str(error)) from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _add_missing_tokens(fast: FastTokenizer, added: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows, in the order of their ids."""
    for key in sorted(added, key=int):
        entry = added[key]
        if fast.token_to_id(entry["content"]) is None:
            flags = {f: bool(entry.get(f, False)) for f in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            fast.add_tokens([AddedToken(entry["content"], **flags)])
