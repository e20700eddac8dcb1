"""C++ sources include the standard headers that they use, themselves or by headers of this project.

What a compiler's own headers bring besides differs: from GCC 13 on, <string> no longer brings <cstdint>.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from paths import ROOT

FOLDERS = "cpp", "tests/support/ttnn_stand_in", "tests/support/warp_emulator"
SOURCES = {
    path: re.sub(r"//.*", "", path.read_text())
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".cpp", ".hpp", ".h", ".cuh")
}

_NAMES = {
    "algorithm": "min max sort stable_sort find find_if any_of all_of none_of fill copy copy_n clamp lower_bound"
    " upper_bound reverse count count_if equal transform max_element min_element",
    "array": "array",
    "bit": "bit_cast popcount countr_zero countl_zero bit_width has_single_bit",
    "cmath": "sqrt exp exp2 log log2 fabs floor ceil isnan isinf tanh erf ldexp frexp nearbyint fma isfinite pow",
    "cstddef": "size_t ptrdiff_t byte",
    "cstdint": "uint8_t uint16_t uint32_t uint64_t uintptr_t int8_t int16_t int32_t int64_t",
    "cstdio": "printf fprintf snprintf fputs fwrite fflush",
    "cstdlib": "getenv abort exit strtol strtoul",
    "cstring": "memcpy memset memcmp memmove strlen strcmp",
    "deque": "deque",
    "exception": "exception_ptr current_exception rethrow_exception terminate",
    "fstream": "ifstream ofstream",
    "functional": "function hash greater less",
    "iomanip": "setw setprecision setfill",
    "iosfwd": "istream ostream",
    "iostream": "cout cerr cin",
    "limits": "numeric_limits",
    "map": "map",
    "memory": "unique_ptr shared_ptr make_unique make_shared",
    "numeric": "accumulate iota gcd lcm reduce",
    "optional": "optional nullopt",
    "queue": "queue priority_queue",
    "set": "set",
    "span": "span",
    "sstream": "ostringstream istringstream stringstream",
    "stdexcept": "runtime_error invalid_argument logic_error out_of_range",
    "string": "string to_string getline",
    "string_view": "string_view",
    "tuple": "tuple tie make_tuple",
    "type_traits": "is_same_v enable_if_t decay_t is_integral_v conditional_t remove_cvref_t underlying_type_t",
    "unordered_map": "unordered_map",
    "unordered_set": "unordered_set",
    "utility": "move pair swap exchange forward make_pair",
    "variant": "variant visit get_if holds_alternative",
    "vector": "vector",
}
HEADER_OF = {name: header for header, names in _NAMES.items() for name in names.split()}

# by the standard, or by every implementation
BRINGS = {
    "cinttypes": {"cstdint"},
    "cstdio": {"cstddef"},
    "cstdlib": {"cstddef"},
    "cstring": {"cstddef"},
    "fstream": {"iosfwd"},
    "iostream": {"iosfwd"},
    "istream": {"iosfwd"},
    "ostream": {"iosfwd"},
    "sstream": {"iosfwd", "string"},
    "stdexcept": {"exception"},
    "stdint.h": {"cstdint"},
    "string": {"iosfwd", "string_view"},
}


def _included(path: Path, name: str) -> list[Path]:
    """The file that `#include "name"` means: the nearest of those whose path ends so."""

    def shared(other: Path) -> int:
        return len(set(other.parents) & set(path.parents))

    found = [other for other in SOURCES if other.as_posix().endswith(f"/{name}")]
    return sorted(found, key=shared, reverse=True)[:1]


@cache
def _headers(path: Path) -> frozenset[str]:
    """Standard headers that a file has."""
    found, seen, todo = set[str](), set[Path](), [path]
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        for header in re.findall(r"#include <([^>]+)>", SOURCES[at]):
            found |= {header, *BRINGS.get(header, ())}
        todo += [other for name in re.findall(r'#include "([^"]+)"', SOURCES[at]) for other in _included(at, name)]
    return frozenset(found)


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_file_has_what_it_uses(folder: str) -> None:
    sources = {path: text for path, text in SOURCES.items() if path.is_relative_to(ROOT / folder)}
    assert sources
    missing = [
        f"{path.relative_to(ROOT)}: std::{name} needs <{HEADER_OF[name]}>"
        for path, text in sources.items()
        for name in sorted(set(re.findall(r"\bstd::(\w+)", text)))
        if HEADER_OF.get(name, "") not in {"", *_headers(path)}
    ]
    assert not missing, "\n".join(missing)


def test_a_missing_header_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "cpp/emulator/engine/program.hpp"
    monkeypatch.setitem(SOURCES, path, SOURCES[path].replace("#include <cstdint>", ""))
    assert "cstdint" not in _headers.__wrapped__(path), "past the cache"
