"""Damaged checkpoints: each loads, or one error of this package names the file. Nothing hangs, nothing eats memory.

TTNN_MOE_FUZZ=5000 tries that many random cases of each file; by default the cases are few, and the same each time.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen3_checkpoints import make
from qwen3_tokenizers import build
from ttnn_moe.errors import CheckpointError, RequestError, TtnnMoeError
from ttnn_moe.models.qwen3 import Qwen3MoeConfig, Tokenizer, load_model
from ttnn_moe.models.qwen3.files import reading
from ttnn_moe.models.qwen3.pieces import reading_file
from ttnn_moe.models.qwen3.shards import examined, packed
from ttnn_moe.visible import visible

CASES = int(os.environ.get("TTNN_MOE_FUZZ", "0"))
SHARD = "model-00001-of-00003.safetensors"
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    SHARD,
)
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8}
SECONDS, MEGABYTES = 30, 600

HOSTILE = {  # raw JSON
    **{text: text for text in "null true false 0 1 -1 1.5 0.0 1e400 -1e400 NaN Infinity [] {} [[]] 1e-320".split()},
    **{text: text for text in '"" "x" "../x" "/" "." "a\\u0000b" "\\ud800" "\\u001b[31m" "\\u202e" [1] ["x"]'.split()},
    **{f"10^{n}": "1" + "0" * n for n in (3, 6, 9, 18, 20, 400, 5000)},
    "2^31": str(1 << 31),
    "deep list": "[" * 100_000 + "]" * 100_000,
    "deep object": '{"a":' * 3000 + "1" + "}" * 3000,
    "long list": "[" + "1," * 200_000 + "1]",
    "long text": '"' + "x" * 1_000_000 + '"',
    "template": '"{{ messages.nothing.here }}"',
    "loop": "\"{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}\"",
    "power": '"{{ 9 ** 9 ** 9 ** 9 }}"',
    "growth": "\"{% set n = namespace(x='x') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}\"",
    "blocks": '"' + "{% if 1 %}" * 300 + "{% endif %}" * 300 + '"',
    "parentheses": '"{{ ' + "(" * 5000 + ")" * 5000 + ' }}"',
}
MARK = '"\\u0001here\\u0001"'


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    os.environ.pop("TTNN_MOE_BACKEND", None)
    directory = make(tmp_path_factory.mktemp("good"), shards="50KB", vocab_size=403, **SIZES)
    build(directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"}]
    added = {"content": "<think>", "special": False, "normalized": False, "lstrip": False}
    settings["added_tokens_decoder"] = {"403": added}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 6], "temperature": 0.5}')
    assert (directory / SHARD).is_file()
    return directory


@contextmanager
def bounded() -> Iterator[None]:
    """Fail where the block takes too long, or the process too much memory."""

    def late(*_: object) -> None:
        raise KeyboardInterrupt(f"a damaged file takes {SECONDS} s")  # passes every wrapper

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) / 1024
    assert grown < MEGABYTES, f"{grown:.0f} MB"


def use(directory: Path) -> None:
    """Everything that reads the files: weights, a forward pass, the tokenizer, the chat template."""
    model = load_model(directory, "reference", "cpu")
    model(torch.tensor([[1]]))
    tokenizer = Tokenizer.from_directory(directory)
    ids = tokenizer.encode("hello <think> 日本")
    tokenizer.decode(ids)
    assert tokenizer.eos_token_id is None or tokenizer.eos_token_id >= 0
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    tokenizer.encode(rendered, add_special_tokens=False)


def check(good: Path, name: str, damaged: bytes) -> bool:
    """Whether the checkpoint loads with this file; if not, the error must be ours."""
    path = good / name
    whole = path.read_bytes()
    path.write_bytes(damaged)
    try:
        with bounded():
            use(good)
        return True
    except TtnnMoeError as error:
        text = str(error)
        assert str(good) in text or name in text
        assert len(text) < 30_000 and text == visible(text)
        return False
    finally:
        path.write_bytes(whole)


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values of a JSON tree."""
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from nodes(inner, (*path, key))


def damaged_json(text: str, draw: Any) -> str:
    """One to three values replaced, removed, renamed, doubled, or moved elsewhere."""
    tree = json.loads(text)
    for _ in range(draw(st.integers(1, 3))):
        paths = list(nodes(tree))
        if len(paths) == 1:
            break
        # the top of a tree matters most, and large files have most of their values at the bottom
        depth = draw(st.integers(1, max(map(len, paths))))
        *outer, key = draw(st.sampled_from([path for path in paths if len(path) == depth]))
        parent = tree
        for part in outer:
            parent = parent[part]
        kind = draw(st.sampled_from(["replace"] * 5 + ["remove", "rename", "double", "wrap"]))
        if kind == "remove":
            del parent[key]
        elif kind == "rename" and isinstance(parent, dict):
            parent[draw(st.text(max_size=5))] = parent.pop(key)
        elif kind == "double":
            if isinstance(parent, list):
                parent.append(parent[key])
            else:
                parent["\u0002" + key] = parent[key]
        elif kind == "wrap":
            parent[key] = draw(st.sampled_from([[parent[key]], {"a": parent[key]}, str(parent[key])[:99]]))
        else:
            parent[key] = "\u0001here\u0001"
    text = json.dumps(tree).replace('"\\u0002', '"')
    while MARK in text:
        text = text.replace(MARK, HOSTILE[draw(st.sampled_from(sorted(HOSTILE)))], 1)
    return text


def damaged_bytes(data: bytes, draw: Any) -> bytes:
    """Cut, with bytes changed, or with bytes put in."""
    # headers are at the start
    at = draw(st.integers(0, min(len(data), draw(st.sampled_from([16, 400, 10_000, len(data)])))))
    kind = draw(st.sampled_from(["cut", "change", "put in", "join"]))
    if kind == "cut":
        return data[:at]
    new = draw(st.binary(min_size=1, max_size=9))
    return data[:at] + new + data[at + (len(new) if kind == "change" else 0) :] + (data if kind == "join" else b"")


@st.composite
def damages(draw: Any, name: str, data: bytes) -> bytes:
    if name.endswith(".jinja"):
        if draw(st.booleans()):
            return json.loads(
                HOSTILE[draw(st.sampled_from(["loop", "power", "growth", "blocks", "parentheses"]))]
            ).encode()
        return damaged_bytes(data, draw)
    if draw(st.integers(0, 3)) == 0:
        return damaged_bytes(data, draw)
    if not name.endswith(".safetensors"):
        return damaged_json(data.decode(), draw).encode()
    (size,) = struct.unpack("<Q", data[:8])
    header = damaged_json(data[8 : 8 + size].decode(), draw).encode()
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


@pytest.mark.parametrize("name", FILES)
def test_damage_loads_or_names_the_file(name: str, good: Path) -> None:
    data = (good / name).read_bytes()
    counts = {True: 0, False: 0}
    apart = good / "chat_template.jinja"
    template = apart.read_bytes()
    if name == "tokenizer_config.json":
        apart.unlink()  # or it would hide the template of that file

    @settings(
        max_examples=CASES or 40,
        derandomize=not CASES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(damaged=damages(name, data))
    def attack(damaged: bytes) -> None:
        counts[check(good, name, damaged)] += 1

    try:
        attack()
    finally:
        apart.write_bytes(template)
    print(f"{name}: {counts[True]} load, {counts[False]} are refused")
    assert counts[False]


def test_the_good_one_loads(good: Path) -> None:
    use(good)


FIELDS = {
    "config.json": ["num_hidden_layers", "num_local_experts", "max_position_embeddings", "rope_parameters"],
    "generation_config.json": ["eos_token_id"],
    "tokenizer_config.json": ["eos_token", "added_tokens_decoder", "additional_special_tokens"],
}


@pytest.mark.parametrize("name, field", [(name, field) for name, fields in FIELDS.items() for field in fields])
def test_hostile_values_of_a_field(name: str, field: str, good: Path) -> None:
    tree = json.loads((good / name).read_text())
    text = json.dumps({**tree, field: "\u0001here\u0001"})
    for hostile in HOSTILE.values():
        check(good, name, text.replace(MARK, hostile).encode())


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


IN_PLACE = {
    "a dangling link": (dangling, "is a link to nowhere, which is not there"),
    "a directory": (Path.mkdir, "is a directory"),
    "a pipe": (lambda path: os.mkfifo(path), "is no regular file"),
}


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", SHARD])
@pytest.mark.parametrize("kind", IN_PLACE)
def test_what_stands_in_the_place_of_a_file_is_named(kind: str, name: str, good: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(good, tmp_path / "model"))
    put, words = IN_PLACE[kind]
    if name == "model.safetensors":
        (directory / "model.safetensors.index.json").unlink()
    (directory / name).unlink(missing_ok=True)
    put(directory / name)
    with pytest.raises(CheckpointError) as error, bounded():
        load_model(directory, "reference", "cpu")
    assert f"{directory / name} {words}; expected a file; to fix it: download or copy it again" in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", IN_PLACE)
def test_so_it_is_of_files_that_may_be_absent(kind: str, name: str, good: Path, tmp_path: Path) -> None:
    """A stop token would be lost in silence, or a template said to be none."""
    directory = Path(shutil.copytree(good, tmp_path / "model"))
    put, words = IN_PLACE[kind]
    (directory / name).unlink(missing_ok=True)
    put(directory / name)
    with pytest.raises(CheckpointError) as error, bounded():
        Qwen3MoeConfig.from_directory(directory)
        Tokenizer.from_directory(directory)
    assert f"{directory / name} {words}; expected a file; to fix it: download or copy it again" in str(error.value)


def test_a_checkpoint_of_pickled_weights_names_the_conversion(good: Path, tmp_path: Path) -> None:
    shutil.copy(good / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="no weights; got no .*; to fix it: download or copy the missing files"):
        load_model(tmp_path, "reference", "cpu")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"only pytorch_model.bin; .*to fix it: convert .* save_pretrained\(\)"):
        load_model(tmp_path, "reference", "cpu")


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        ("utf-8-sig", "begins with a byte-order mark; .*to fix it: save the file again without it"),
        ("utf-16", "is not UTF-8 text; .*to fix it: save the file again as UTF-8"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_another_encoding_is_named(name: str, encoding: str, words: str, good: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(good, tmp_path / "model"))
    (directory / name).write_text((good / name).read_text(), encoding=encoding)
    with pytest.raises(CheckpointError, match=f"{directory / name} {words}"):
        use(directory)


def test_a_checksum_covers_names_dtypes_shapes_and_bytes(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6).view(2, 3), "b": torch.zeros(1, dtype=torch.uint8)}
    data, path = packed(tensors, "a test"), tmp_path / SHARD
    for old, new in ((b"", b""), (b'"a":', b'"c":'), (b'"I64"', b'"F64"'), (b"[2,3]", b"[3,2]"), (b"\x05", b"\x06")):
        assert data.count(old) == 1 or not old
        path.write_bytes(data.replace(old, new))
        assert examined(path) == ("a test", old == new)


PANIC = type("PanicException", (BaseException,), {})  # of Rust, by the parsers


@pytest.mark.parametrize(
    "error, kind",
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (RequestError("of this package"), RequestError),
        (RecursionError("too deep"), CheckpointError),
        (PANIC("out of range"), CheckpointError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_failure_names_the_file_and_an_interrupt_passes(error: BaseException, kind: type[BaseException]) -> None:
    with pytest.raises(kind) as raised, reading(Path("config.json")):
        raise error
    if kind is CheckpointError:
        assert str(raised.value) == f"config.json cannot be read; got {type(error).__name__}: {error}."
    else:
        assert raised.value is error


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("unable to mmap 9 bytes from file </a>: Cannot allocate memory (12)")]
)
def test_a_file_for_which_memory_lacks_is_not_called_damaged(error: Exception, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(
        CheckpointError, match=r"model.safetensors cannot be read; got .*; to fix it: free memory"
    ) as found:
        with reading_file(path):
            raise error
    assert "download" not in str(found.value)
