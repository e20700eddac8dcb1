"""A pytest plugin (run_interpreted names it): Triton's interpreter without what it does over and over.

Three things took more than half of the time:
* Each call of a device function looks for every builtin of Triton's language, to replace what the launch around it has
  replaced already.
* Each sum and product of integers is done again by five operators of 64 bits, to see an overflow. NumPy sees it
  at once.
* Each tensor makes its shape anew.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch = interpreter._patch_lang
_new_block, _new_tensor = tl.block_type.__init__, tl.tensor.__init__
_blocks: dict[tuple[int, ...], tuple[int, Any]] = {}
_shapes: dict[tuple[int, ...], tuple[tl.constexpr, Any]] = {}
_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _patch_once(function: Any) -> Any:
    langs = [value for value in function.__globals__.values() if value is tl or value is tl.core]
    if langs and all(lang.static_print is print for lang in langs):
        return interpreter._LangPatchScope()  # patched, and restored by whoever did it
    return _patch(function)


def _check_overflow(self: Any, lhs: tl.tensor, rhs: tl.tensor, operation: Any) -> None:
    of = lhs.type.scalar
    if of.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
        return
    assert of == rhs.type.scalar and of.is_int()
    exact = _EXACT[operation.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
    inside = of.get_int_min_value() <= exact.min() and exact.max() <= of.get_int_max_value()
    assert inside, f"int{of.int_bitwidth} overflow detected for operation {operation.__name__}"


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    sizes = tuple(type.shape.values) if type.is_block() else ()
    if sizes not in _shapes:
        _new_tensor(self, handle, type)
        _shapes[sizes] = self.numel, self.shape
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shapes[sizes]


def _make_block(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    if sizes not in _blocks:
        _new_block(self, element_ty, shape)
        _blocks[sizes] = self.numel, self.shape
    self.numel, self.shape = _blocks[sizes]
    self.element_ty, self.name = element_ty, f"<{sizes}, {element_ty}>"


interpreter._patch_lang = _patch_once
core.tensor.__init__ = _make_tensor  # type: ignore[method-assign]
core.block_type.__init__ = _make_block  # type: ignore[method-assign]
TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow  # type: ignore[method-assign]
