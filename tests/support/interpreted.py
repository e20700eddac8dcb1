"""A pytest plugin (run_interpreted names it): Triton's interpreter without what it does over and over.

These took three quarters of the time:
* Each call of a device function looks for every builtin of Triton's language, to replace what the launch around it has
  replaced already; and each call of a builtin copies its arguments.
* Each sum and product of integers is done again by five operators of 64 bits, to see an overflow. NumPy sees it
  at once.
* Each tensor makes its shape anew, each constant its tensor, and each NumPy type a table of all.
* Operands of one type and one shape are promoted and broadcast to what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch = interpreter._patch_lang
_find_type, _same_type = interpreter._get_np_dtype, tl.dtype.__eq__
_new_block, _new_tensor = tl.block_type.__init__, tl.tensor.__init__
_constant, _check_types = TritonSemantic.scalar_constant, TritonSemantic.binary_op_type_checking_impl
_broadcast = TritonSemantic.broadcast_impl_value
_blocks: dict[tuple[int, ...], tuple[int, Any]] = {}
_shapes: dict[tuple[int, ...], tuple[tl.constexpr, Any]] = {}
_languages: dict[str, list[Any]] = {}
_numpy_types: dict[str, np.dtype] = {}
_constants: dict[tuple[Any, ...], tl.tensor] = {}
_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _patch_once(function: Any) -> Any:
    names = function.__globals__
    langs = _languages.get(names["__name__"])
    if langs is None:
        langs = [value for value in names.values() if value is tl or value is tl.core]
        _languages[names["__name__"]] = langs
    if langs and all(lang.static_print is print for lang in langs):
        return interpreter._LangPatchScope()  # patched, and restored by whoever did it
    return _patch(function)


def _patch_one(obj: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
    inside = getattr(member, "__wrapped__", member)  # without the check that a semantic was given

    def call(*args: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return inside(*args, **named)

    scope.set_attr(obj, name, call)


def _numpy_type(of: Any) -> np.dtype:
    name = of.scalar.name
    found = _numpy_types.get(name)
    if found is None:
        found = _numpy_types[name] = _find_type(of)
    return found


def _is_same_type(self: tl.dtype, other: Any) -> bool:
    return self.name == other.name if type(other) is tl.dtype else _same_type(self, other)


def _keep_constant(self: Any, value: Any, dtype: tl.dtype) -> tl.tensor:
    if type(value) not in (int, float, bool):
        return _constant(self, value, dtype)
    key = type(value), str(value), dtype.name  # 0.0 and -0.0 are equal
    found = _constants.get(key)
    if found is None:
        found = _constants[key] = _constant(self, value, dtype)
    return found


def _check_different_types(self: Any, lhs: Any, rhs: Any, *how: bool, **named: bool) -> Any:
    divides = len(how) == 4 or "div_or_mod" in named  # then narrow types are promoted
    if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and not divides:
        kind = lhs.type.scalar
        if type(kind) is tl.dtype and kind == rhs.type.scalar:
            return self.broadcast_impl_value(lhs, rhs)
    return _check_types(self, lhs, rhs, *how, **named)


def _broadcast_different(self: Any, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
        return lhs, rhs  # _make_block gives blocks of one shape one tuple
    return _broadcast(self, lhs, rhs)


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
interpreter._patch_attr = _patch_one
interpreter._get_np_dtype = _numpy_type
tl.dtype.__eq__ = _is_same_type  # type: ignore[method-assign]
core.tensor.__init__ = _make_tensor  # type: ignore[method-assign]
core.block_type.__init__ = _make_block  # type: ignore[method-assign]
TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow  # type: ignore[method-assign]
TritonSemantic.scalar_constant = _keep_constant  # type: ignore[method-assign]
TritonSemantic.binary_op_type_checking_impl = _check_different_types  # type: ignore[method-assign]
TritonSemantic.broadcast_impl_value = _broadcast_different  # type: ignore[method-assign]
