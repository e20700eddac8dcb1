"""The tokenizer of a checkpoint: text <-> ids, and the chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from ttnn_moe.errors import CheckpointError, RequestError
from ttnn_moe.visible import said, shown

from .chat_template import ChatTemplate
from .files import Fields, is_failure, is_file, path_of, read_json, read_text, reading
from .text_stream import TextStream

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_OF_IDS = ("tokenize", "return_tensors", "return_dict")
"""What transformers' apply_chat_template takes, and a template does not."""
_NOT_TAKEN = {
    "chat_template": "make another Tokenizer with this template",
    "continue_final_message": "cut the text after the last message",
}
"""Options of it that change its text in transformers and would do nothing here, and what to do instead."""


class Tokenizer:
    """A fast tokenizer with its chat template, without transformers.

    Attributes:
        special_tokens: name ("eos_token", ...) -> text, as chat templates see them.
        chat_template: Jinja source, or None. tool_template: the one for conversations with tools, if it is another.
        source: where they come from, as errors name it.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        source: str | Path = "this checkpoint",
        tool_template: str | None = None,
    ):
        self.fast, self.source = fast, source
        self.special_tokens = dict(special_tokens or {})
        self.chat_template, self.tool_template = chat_template, tool_template

    def __repr__(self) -> str:
        template = ", with a chat template" if self.chat_template is not None else ""
        return f"Tokenizer({self.source}, {self.fast.get_vocab_size()} tokens{template})"

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Read tokenizer.json and, where they are, tokenizer_config.json, special_tokens_map.json, chat_template.jinja.

        Raises:
            CheckpointError: no tokenizer.json, or a file that cannot be read.
        """
        directory = path_of(directory)
        with reading(directory):
            path = directory / "tokenizer.json"
            if not is_file(path):
                raise CheckpointError(
                    f"{directory} has no tokenizer.json", remedy="fetch the tokenizer files of the checkpoint"
                )
            with reading(path):
                fast = FastTokenizer.from_str(read_json(path))
                fast.no_truncation()
                fast.no_padding()
            path = directory / "tokenizer_config.json"
            config = Fields.of_file(path) if is_file(path) else Fields({}, path)
            with reading(path):
                special = _add_tokens(fast, directory, config)
            templates = _templates(directory, config)
            return cls(fast, special, templates.get("default"), directory, templates.get("tool_use"))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """ids of a text; special tokens written in it are recognised.

        Raises:
            RequestError: the tokenizer refuses the text.
        """
        try:
            return self.fast.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            if (at := _lone_surrogate(text)) is not None:
                raise RequestError(
                    f"the tokenizer of {self.source} refuses this text: it has a lone surrogate",
                    got=f"{ascii(text[at])} at character {at}",
                    expected="text that UTF-8 can hold",
                    remedy="decode the text again from its bytes, with errors='replace'",
                ) from error
            raise self._error(error, "refuses this text") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD.

        Raises:
            RequestError: the tokenizer refuses the ids.
        """
        try:
            return self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise self._error(error, "refuses these ids") from error

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for one sequence whose tokens come one at a time."""
        return TextStream(self, skip_special_tokens)

    def word(self, token: int, skip_special_tokens: bool = True) -> str | None:
        """A token as the vocabulary writes it; None: `decode` leaves it out.

        Raises:
            RequestError: the tokenizer refuses the id.
        """
        try:
            return None if skip_special_tokens and token in self._special_ids else self.fast.id_to_token(token)
        except BaseException as error:
            raise self._error(error, "refuses these ids") from error

    @cached_property
    def reads_bytes(self) -> bool:
        """Whether the decoder is, or has, a ByteFallback."""
        decoder = self.fast.decoder
        return decoder is not None and b'"type":"ByteFallback"' in decoder.__getstate__()

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self.fast.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def eos_token_id(self) -> int | None:
        """Id of the special token eos_token; None: the tokenizer names none."""
        text = self.special_tokens.get("eos_token")
        return None if text is None else self.fast.token_to_id(text)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation, made by the checkpoint's template; unlike in transformers, never token ids.

        Args:
            messages: a list of objects with "role" and "content".
            add_generation_prompt: end with the header of the assistant's turn.
            tools: JSON schemas of callable tools.
            documents: what the answer may quote, as the template reads it.
            **variables: further template variables ("enable_thinking", ...).

        Returns:
            Text to encode with add_special_tokens=False.

        Raises:
            RequestError: no messages, or something else; no template, or one that refuses these messages; options of
                transformers that ask for token ids, for another template, or to continue the last message.
        """
        messages = _conversation(messages)
        if ids := [name for name in _OF_IDS if variables.pop(name, None)]:
            raise RequestError(
                "apply_chat_template returns text, not token ids",
                got=", ".join(ids),
                remedy=f"leave {' and '.join(ids)} out, and encode(text, add_special_tokens=False)",
            )
        for name, remedy in _NOT_TAKEN.items():
            if variables.pop(name, None):
                raise RequestError(f"apply_chat_template does not take {name}", remedy=remedy)
        if not messages:
            raise RequestError("a conversation needs at least one message", got="none")
        template = self.chat_template if tools is None or self.tool_template is None else self.tool_template
        if template is None:
            raise RequestError(f"{self.source} has no chat template", remedy="give the text as it is (--no-chat)")
        return _compiled(template, self.source).render(
            messages=[{k: v for k, v in message.items() if v is not None} for message in messages],
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            **{**self.special_tokens, **variables},
        )

    def _error(self, error: BaseException, what: str) -> BaseException:
        """What to raise for an error of the fast tokenizer."""
        return RequestError(f"the tokenizer of {self.source} {what}", got=said(error)) if is_failure(error) else error


@lru_cache(maxsize=8)
def _compiled(template: str, source: str | Path) -> ChatTemplate:
    return ChatTemplate(template, source)


def _conversation(messages: Any) -> list[Mapping[str, Any]]:
    """The messages as a list. Raises RequestError unless they are objects."""
    apart = isinstance(messages, Iterable) and not isinstance(messages, str | bytes | Mapping)
    found: list[Any] = list(messages) if apart else [None]
    if all(isinstance(message, Mapping) for message in found):
        return found
    raise RequestError(
        "messages are no conversation",
        got=shown(messages),
        expected='a list of objects with "role" and "content"',
        remedy='[{"role": "user", "content": text}] for one text of a user',
    )


def _lone_surrogate(text: object) -> int | None:
    """The place of the first half of a surrogate pair that stands alone in a text; None: there is none."""
    characters = text if isinstance(text, str) else ""
    return next((at for at, one in enumerate(characters) if "\ud800" <= one <= "\udfff"), None)


def _add_tokens(fast: FastTokenizer, directory: Path, config: Fields) -> dict[str, str]:
    """Add the tokens that other files than tokenizer.json list or name, as transformers does; special ones by name."""
    known = list(fast.get_added_tokens_decoder().values())
    places, path = [config], directory / "special_tokens_map.json"
    if "added_tokens_decoder" in config.values:
        listed = config.fields("added_tokens_decoder")
        if wrong := [key for key in listed.values if not (key.isdecimal() and len(key) < 10)]:
            raise listed.wrong("a key", wrong[0], "a token id")
        tokens = [_token(listed, key) for key in sorted(listed.values, key=int)]
    else:
        tokens = known.copy()
        if is_file(path):
            places.append(Fields.of_file(path))
    found = {name: place for place in places for name in (*_SPECIAL, *_EXTRA) if place.values.get(name)}
    named = {name: _token(found[name], name) for name in _SPECIAL if name in found}
    extra = next((_items(found[name], name) for name in _EXTRA if name in found), [])
    special = {token.content for token in named.values()}
    held = {token.content for token in (*known, *tokens)}
    new = [token for token in (*named.values(), *extra) if token.content not in held]
    for token in (*new, *(token for token in tokens if token.content in special)):
        token.special = True
    fast.add_tokens([*tokens, *new])  # a token that the tokenizer knows keeps its id
    return {name: token.content for name, token in named.items()}


def _items(fields: Fields, name: str) -> list[AddedToken]:
    """The tokens of a list, or of an object that gives each a name."""
    value = fields.values[name]
    tokens = value.values() if isinstance(value, Mapping) else fields.items(name)
    return [_token(Fields({name: token}, fields.source), name) for token in tokens]


def _token(fields: Fields, name: str) -> AddedToken:
    """A token as these files write it: text, or an object with its content."""
    if not isinstance(fields.values[name], Mapping):
        return AddedToken(fields.text(name), special=True)
    entry = fields.fields(name)
    return AddedToken(entry.text("content"), **{flag: entry.flag(flag) for flag in _FLAGS if flag in entry.values})


def _templates(directory: Path, config: Fields) -> dict[str, str]:
    """Jinja by the name of the template: "default", "tool_use"."""
    path = directory / "chat_template.jinja"
    if is_file(path):
        return {"default": read_text(path)}
    named = config.values.get("chat_template")
    if named is None:
        return {}
    if not isinstance(named, list):
        return {"default": config.text("chat_template")}
    entries = [Fields({"entry": entry}, f"chat_template of {config.source}").fields("entry") for entry in named]
    return {entry.text("name"): entry.text("template") for entry in entries}
