"""What reaches a reader: control characters are shown instead of sent, and no message is long."""

from __future__ import annotations

import copy
import pickle

import pytest

from ttnn_moe.errors import ContractError, TtnnMoeError
from ttnn_moe.parallel.hierarchical.transport import PeerStopped, Report
from ttnn_moe.parallel.ranks.faults import RankStopped
from ttnn_moe.tenstorrent.emulator.result import EmulationError
from ttnn_moe.visible import cut, shown, visible, words

SENT = [
    *map(chr, [*range(9), *range(11, 32), *range(127, 160), *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xD800])
]
KEPT = ["", "a\tb\nc", "naïve — 日本", "👩\u200d👩\u200d👧", "שלום\u200f", "\\x1b[31m", "[bold]x[/]", "\u00a0\ufeff"]


@pytest.mark.parametrize("text", KEPT)
def test_text_stays(text: str) -> None:
    assert visible(text) == text


def test_control_characters_are_escapes_that_python_reads_back() -> None:
    for character in SENT:
        seen = visible(f"a{character}b")
        assert seen.isascii() and seen.isprintable() and eval(f"'{seen}'") == f"a{character}b"


def test_errors_show_them() -> None:
    text = "x".join(SENT)
    error = ContractError(text, got=text, expected=[text], remedy=text, details=[text])
    assert not set(str(error)) & set(SENT)
    assert error.got == text


@pytest.mark.parametrize(
    "error",
    [
        ContractError("wrong", got=1, expected="2", remedy="a remedy", details=["a", "b"]),
        RankStopped(1, 0, "it died"),
        PeerStopped(Report(1, 2, 3, 0), 0, 30.0),
        EmulationError([]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_pass_between_processes(error: TtnnMoeError) -> None:
    """A pool of processes waits for ever where an error cannot be read back."""
    for got in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(got) is type(error)
        assert (str(got), vars(got)) == (str(error), vars(error))


def endless() -> list[object]:
    out: list[object] = []
    out.append(out)
    return out


LARGE = {
    "text": lambda: "x" * 78_000_000,
    "bytes": lambda: bytes(78_000_000),
    "list": lambda: ["x" * 99] * 1_000_000,
    "wide and deep": lambda: [[[["x" * 300] * 99] * 99] * 99] * 99,
    "dict": lambda: {i: "x" * 99 for i in range(100_000)},
    "set": lambda: set(range(100_000)),
    "integer": lambda: 10**100_000,
    "endless": endless,
}


@pytest.mark.parametrize("name", LARGE)
def test_messages_are_cut(name: str) -> None:
    value = LARGE[name]()
    for words_of in (shown, words):
        assert len(words_of(value)) < 2100
    error = TtnnMoeError("no", got=value, expected=value, details=["y" * 10_000] * 1000)
    assert len(str(error)) < 30_000 and str(error).endswith("... and 960 more")


def test_a_cut_text_keeps_its_ends() -> None:
    assert cut("a" * 50 + "b" * 50, 20) == "a" * 15 + " ... (100 characters in all) ... " + "b" * 5


@pytest.mark.parametrize("value, text", [("a", "a"), ([1, "b"], "[1, 'b']"), (7, "7"), (None, "None"), (True, "True")])
def test_words_of_short_values(value: object, text: str) -> None:
    assert words(value) == text
