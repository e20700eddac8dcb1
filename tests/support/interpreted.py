"""A pytest plugin (run_interpreted names it): Triton's interpreter without what it does over and over.

Each call of a device function looks for every builtin of Triton's language, to replace what the launch around it has
replaced already; that was half of the time.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang


def _patch_once(function: Any) -> Any:
    langs = [value for value in function.__globals__.values() if value is tl or value is tl.core]
    if langs and all(lang.static_print is print for lang in langs):
        return interpreter._LangPatchScope()  # patched, and restored by whoever did it
    return _patch(function)


interpreter._patch_lang = _patch_once
