"""Text for people: control characters are shown instead of sent, and long values are cut."""

from __future__ import annotations

import re
import reprlib
from typing import Any

LONGEST = 2000
"""Characters of one part of a message."""
_TAIL = 400
# all but newline and tab: C0, DEL, C1, line separators, bidirectional overrides and isolates, lone surrogates
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""The text with its control characters as escapes: ESC becomes the four characters \x1b.

    Newline and tab stay. Bidirectional overrides, which reorder what a terminal shows, become escapes too. The
    function treats each character alone, so a sequence that comes in pieces is shown piece by piece.
    """
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def cut(text: str, longest: int = LONGEST) -> str:
    """The text, or its beginning and its end where it has more than `longest` characters."""
    if len(text) <= longest:
        return text
    tail = min(_TAIL, longest // 4)
    return f"{text[: longest - tail]} ... ({len(text)} characters in all) ... {text[-tail:]}"


def shown(value: object) -> str:
    """repr(value), cut before it is built: a value of any size gives a short text. Of a tensor, shape and dtype."""
    try:
        return cut(_SHORT.repr(value))
    except Exception:  # whatever a foreign __repr__ raises
        return f"a value of type {type(value).__name__}"


def words(value: object) -> str:
    """str(value) in the same way; a text is not quoted."""
    return cut(value) if isinstance(value, str) else shown(value) if type(value) in _SIZED else cut(str(value))


def said(error: BaseException) -> str:
    """The class and the words of an error that may be anybody's."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class _Short(reprlib.Repr):
    """Bounds each level: at most 32 items, 3 levels, 200 characters of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = self.maxdeque = 32
        self.maxstring = self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write out very long integers
        return repr(x) if x.bit_length() < 512 else f"an integer of {x.bit_length()} bits"

    def repr_Tensor(self, x: Any, level: int) -> str:
        return f"a tensor {list(x.shape)} of {str(x.dtype).removeprefix('torch.')}"

    def repr_DTensor(self, x: Any, level: int) -> str:
        return f"a DTensor {list(x.shape)} of {str(x.dtype).removeprefix('torch.')}"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x[: self.maxstring])


_SHORT = _Short()
_SIZED = (bytes, dict, frozenset, int, list, set, tuple)
