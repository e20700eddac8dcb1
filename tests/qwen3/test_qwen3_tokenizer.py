"""The tokenizer against transformers' AutoTokenizer on the same files, and text that comes token by token."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer

from qwen3_checkpoints import HAS_TINY, TINY
from qwen3_tokenizers import TEXTS, build
from ttnn_moe.errors import CheckpointError, RequestError
from ttnn_moe.models.qwen3 import Tokenizer, chat_template

CHATS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": 'Be <b>brief</b> & "kind".'}, {"role": "user", "content": "  日本?  "}],
    [
        {"role": "user", "content": "one", "name": None},
        {"role": "assistant", "content": "<think>hm</think>\n\nanswer"},
        {"role": "user", "content": "two {{ 7 * 7 }}"},
    ],
]


@pytest.fixture(scope="module", params=["made", "bundled"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "made":
        return build(tmp_path_factory.mktemp("tokenizer"))
    if not HAS_TINY:
        pytest.skip("the bundled checkpoint is not built")
    return TINY


@pytest.fixture(scope="module")
def pair(directory: Path) -> tuple[Tokenizer, object]:
    return Tokenizer.from_directory(directory), AutoTokenizer.from_pretrained(directory)


def test_ids_and_text_are_those_of_transformers(pair) -> None:
    ours, theirs = pair
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids) == ours.decode(ids, True)
    assert ours.eos_token_id == theirs.eos_token_id


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("chat", CHATS, ids=["one", "system", "turns"])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"tools": [{"name": "f", "q": "<é>"}]}])
def test_chats_are_those_of_transformers(pair, chat, prompt: bool, variables) -> None:
    ours, theirs = pair
    expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt, **variables)
    assert ours.apply_chat_template(chat, add_generation_prompt=prompt, **variables) == expected


def test_what_a_template_refuses(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(build(tmp_path))
    with pytest.raises(RequestError, match="unknown role robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "hi"}])
    with pytest.raises(RequestError, match="at least one message"):
        tokenizer.apply_chat_template([])
    for nothing in ("hi", ["hi"], CHATS[0][0], 3, None):
        with pytest.raises(RequestError, match='no conversation; got .*; expected a list of objects with "role"'):
            tokenizer.apply_chat_template(nothing)  # type: ignore[arg-type]
    tokenizer = Tokenizer(tokenizer.fast, {}, None)
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template(CHATS[0])
    for escape in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ ''.__class__ }}{% if"):
        with pytest.raises(RequestError, match="refuses"):
            Tokenizer(tokenizer.fast, {}, escape + "{{ nothing.here }}").apply_chat_template(CHATS[0])


def test_a_template_reads_documents(made: Tokenizer) -> None:
    template = "{{ documents is none }} {% for one in documents or () %}{{ one.title }}{% endfor %}"
    tokenizer = Tokenizer(made.fast, {}, template)
    assert tokenizer.apply_chat_template(CHATS[0]) == "True "
    assert tokenizer.apply_chat_template(CHATS[0], documents=[{"title": "A"}, {"title": "B"}]) == "False AB"


def test_a_field_of_none_is_no_field(made: Tokenizer) -> None:
    tokenizer = Tokenizer(made.fast, {}, "{% for one in messages %}{{ one.name is defined }} {% endfor %}")
    assert tokenizer.apply_chat_template([{"name": None}, {"name": "a"}, {"name": ""}]) == "False True True "


def test_a_conversation_may_come_from_anywhere(pair) -> None:
    ours, _ = pair
    assert ours.apply_chat_template(iter(CHATS[0])) == ours.apply_chat_template(tuple(CHATS[0]))


def test_options_that_ask_for_ids_are_refused(pair) -> None:
    ours, _ = pair
    want = ours.apply_chat_template(CHATS[0])
    assert ours.apply_chat_template(CHATS[0], tokenize=False, return_tensors=None) == want
    with pytest.raises(
        RequestError, match="returns text, not token ids; got tokenize, return_tensors; to fix it: leave"
    ):
        ours.apply_chat_template(CHATS[0], tokenize=True, return_tensors="pt")


@pytest.mark.parametrize("name, value", [("chat_template", "{{ 1 }}"), ("continue_final_message", True)])
def test_options_that_would_do_nothing_are_refused(pair, name: str, value: object) -> None:
    ours, _ = pair
    assert ours.apply_chat_template(CHATS[0], **{name: None}) == ours.apply_chat_template(CHATS[0])
    with pytest.raises(RequestError, match=f"apply_chat_template does not take {name}; to fix it: "):
        ours.apply_chat_template(CHATS[0], **{name: value})


def test_a_lone_surrogate_is_named(pair) -> None:
    with pytest.raises(RequestError, match=r"refuses this text: it has a lone surrogate; got '\\ud800' at character 2"):
        pair[0].encode("ab\ud800c")
    with pytest.raises(RequestError, match="refuses this text"):
        pair[0].encode(3)


def test_a_tokenizer_prints_where_it_is_from(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    size = tokenizer.fast.get_vocab_size()
    assert repr(tokenizer) == f"Tokenizer({directory}, {size} tokens, with a chat template)"


HUNGRY = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "text": "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "product": "{{ 'x' * 10 ** 12 }}",
    "power": "{{ 9 ** 9 ** 9 ** 9 }}",
    "sums": "{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "joins": "{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "join": "{% set x = 'x' * 9999999 %}{{ (x ~ x ~ x) | length }}",
    "width": "{{ ('%1000000000d' % 5) | length }}",
    "widths": "{{ ('%*d' % (1000000000, 5)) | length }}",
    "named width": "{{ ('%(a)-1000000000s' % {'a': 5}) | length }}",
    "precision": "{{ ('%.1000000000f' % 5) | length }}",
    "long format": "{{ (('%' * 16777216) % 5) | length }}",
    "places": "{{ (('%(a)s' * 99999) % {'a': 'x' * 99999}) | length }}",
    "surrogate": "{{ '\\ud800' }}",
}


@pytest.mark.parametrize("name", HUNGRY)
def test_a_template_that_takes_all_is_refused(name: str, made: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    with pytest.raises(RequestError, match="the chat template of DIR refuses"):
        Tokenizer(made.fast, {}, HUNGRY[name], "DIR").apply_chat_template(CHATS[0])
    assert sys.gettrace() is None


def test_a_template_joins_and_formats(made: Tokenizer) -> None:
    template = """{% macro m(a) %}{{ a ~ '!' ~ none ~ 1.5 }}{% endmacro %}{{ m('x') ~ [1, 'y'] ~ '<' }} {{ 7 % 4 }}
{{- ' %s|%05.1f|%%|%-3d|' % ('é', 2.25, 4) }}{{ '%(a)s%(a)s' % {'a': 'z'} }}{{ '%s' % 3 }}{{ 'a' ~ 'b' }}
{{- ' 20240101 %s' % 1 }}"""
    text = Tokenizer(made.fast, {}, template).apply_chat_template(CHATS[0])
    assert text == "x!None1.5[1, 'y']< 3 é|002.2|%|4  |zz3ab 20240101 1"


@pytest.mark.parametrize("text, token", [("\udc80", -1), (5, "x"), (None, None), ("\ud800", 1 << 40)])
def test_what_a_tokenizer_refuses(text: object, token: object, made: Tokenizer) -> None:
    with pytest.raises(RequestError, match="refuses this text"):
        made.encode(text)
    with pytest.raises(RequestError, match="refuses these ids"):
        made.decode([token])


def test_files_that_are_not_there_or_broken(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer.json cannot be read"):
        Tokenizer.from_directory(tmp_path)


def test_template_and_tokens_of_the_older_layout(tmp_path: Path) -> None:
    """The template inside tokenizer_config.json, and a token that only added_tokens_decoder knows."""
    build(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    n = Tokenizer.from_directory(tmp_path).fast.get_vocab_size()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"content": "<|im_end|>"},
        "chat_template": [{"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"}],
        "added_tokens_decoder": {str(n): {"content": "<think>", "special": False, "normalized": False}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.apply_chat_template(CHATS[0]) == "hi<|im_end|>"
    assert tokenizer.encode("<think>") == [n]


PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
ODD_FILES = {
    "eos named elsewhere": ({"eos_token": None}, {"eos_token": {"content": "<|im_end|>", **PLAIN}}),
    "two files": ({"eos_token": "<|endoftext|>"}, {"eos_token": "<|im_end|>", "additional_special_tokens": ["<a>"]}),
    "one file": ({"eos_token": "<|im_end|>", "added_tokens_decoder": {}}, {"eos_token": "<|endoftext|>"}),
    "unknown": ({"eos_token": "<eos>", "pad_token": "<pad>", "additional_special_tokens": ["<a>"]}, None),
    "objects": ({}, {"extra_special_tokens": [{"content": "<a>", **PLAIN}, "<|im_end|>"]}),
    "names": ({"extra_special_tokens": {"image_token": "<a>"}}, None),
    "known": ({"added_tokens_decoder": {"0": {"content": "h", "special": False, **PLAIN}}}, None),
    "special": ({"added_tokens_decoder": {"400": {"content": "<|im_start|>", "special": True, **PLAIN}}}, None),
}


@pytest.mark.parametrize("name", ODD_FILES)
def test_special_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = build(tmp_path) / "tokenizer.json"
    whole = json.loads(path.read_text())
    whole["added_tokens"] = [{**token, "special": False} for token in whole["added_tokens"]]
    path.write_text(json.dumps(whole))
    settings, named = ODD_FILES[name]
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    if named is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    ours, theirs = Tokenizer.from_directory(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs("the <|im_start|> <a>b<eos><pad> <|im_end|> h<|endoftext|>")["input_ids"]
    assert ours.encode("the <|im_start|> <a>b<eos><pad> <|im_end|> h<|endoftext|>") == ids
    assert ours.eos_token_id == theirs.eos_token_id
    stream = ours.stream()
    text = "".join([*map(stream.push, ids), stream.finish()])
    assert text == ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_template_for_tools_is_taken_as_by_transformers(tmp_path: Path) -> None:
    path = build(tmp_path) / "tokenizer_config.json"
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": name, "template": name + "{{ tools | length }}"} for name in ("default", "tool_use")]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": named}))
    ours, theirs = Tokenizer.from_directory(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for tools in ([{"name": "f"}], []):
        expected = theirs.apply_chat_template(CHATS[0], tokenize=False, tools=tools)
        assert ours.apply_chat_template(CHATS[0], tools=tools) == expected
    with pytest.raises(RequestError, match="NoneType"):
        ours.apply_chat_template(CHATS[0])
    assert Tokenizer(ours.fast, {}, "default").apply_chat_template(CHATS[0], tools=[]) == "default"


def test_a_template_may_be_replaced(made: Tokenizer) -> None:
    tokenizer = Tokenizer(made.fast, {}, "one")
    assert tokenizer.apply_chat_template(CHATS[0]) == "one"
    tokenizer.chat_template = "two"
    assert tokenizer.apply_chat_template(CHATS[0]) == "two"


def test_the_error_of_a_template_names_its_operator(made: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"unsupported operand type\(s\) for \+: 'NoneType' and 'str'"):
        Tokenizer(made.fast, {}, "{{ none + 'x' }}").apply_chat_template(CHATS[0])


@pytest.mark.parametrize("key", ["x", "-1", "", "9" * 5000])
def test_a_token_id_that_is_none_is_named(key: str, tmp_path: Path) -> None:
    path = build(tmp_path) / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "added_tokens_decoder": {key: {"content": "<think>"}}}))
    with pytest.raises(CheckpointError, match="a token id"):
        Tokenizer.from_directory(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(build(tmp_path_factory.mktemp("stream")))


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 402), max_size=40), skip=st.booleans())
def test_pieces_of_any_tokens_make_the_whole_text(made: Tokenizer, ids: list[int], skip: bool) -> None:
    """Random ids are mostly broken UTF-8: the hard case."""
    stream = made.stream(skip)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == made.decode(ids, skip)


@pytest.fixture(scope="module")
def fallback() -> Tokenizer:
    """Four words, 256 bytes and a special token, with the decoder of Llama's tokenizers."""
    words = ["<unk>", "\u2581a", "b", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256))]
    fast = FastTokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    fast.add_tokens([AddedToken("<end>", special=True)])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(parts)
    return Tokenizer(fast)


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    stream = tokenizer.stream(skip)
    return [*(stream.push(token) for token in ids), stream.finish()]


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from("\U0001f600é汉\ufffd").map(lambda one: [4 + byte for byte in one.encode()])
        | st.integers(0, 261).map(lambda token: [token]),
        max_size=12,
    ),
    skip=st.booleans(),
)
def test_pieces_of_a_decoder_with_byte_fallback_make_the_whole_text(
    fallback: Tokenizer, parts: list[list[int]], skip: bool
) -> None:
    """One broken byte changes a whole run of bytes; 260 is special, 261 is no token."""
    ids = [token for part in parts for token in part]
    assert "".join(pieces(fallback, ids, skip)) == fallback.decode(ids, skip)


def test_a_run_of_bytes_comes_when_it_ends(fallback: Tokenizer) -> None:
    ids = [1, *(4 + byte for byte in "\U0001f600é".encode()), 2]
    assert pieces(fallback, ids) == ["a", *[""] * 6, "\U0001f600éb", ""]
    assert pieces(fallback, [1, 260, 1], True) == ["a", "", " a", ""], "what is skipped is no context"


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=80))
def test_pieces_of_any_bytes_make_the_whole_text(made: Tokenizer, data: bytes) -> None:
    ids = [byte_ids(made)[byte] for byte in data]
    assert "".join(pieces(made, ids)) == made.decode(ids) == data.decode(errors="replace")


def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """The token of each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    found = [tokenizer.fast.token_to_id(letters[byte]) for byte in range(256)]
    assert None not in found
    return found


@pytest.mark.parametrize("data", ["\ufffd".encode(), b"\x80", b"\xf0\x9f"])
def test_a_piece_costs_the_same_however_many_came_before(
    data: bytes, made: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, decoded = Tokenizer.decode, list[int]()

    def counted(own: Tokenizer, ids: list[int], *rest: bool) -> str:
        decoded.append(len(ids))
        return decode(own, ids, *rest)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    ids = [byte_ids(made)[byte] for byte in data] * 500
    assert len("".join(pieces(made, ids))) == 500
    assert max(decoded) <= 40


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_pieces_of_a_text_never_show_half_a_character(made: Tokenizer, text: str) -> None:
    stream, shown = made.stream(False), ""
    for token in made.encode(text):
        shown += stream.push(token)
        assert text.startswith(shown)
    assert shown == text
