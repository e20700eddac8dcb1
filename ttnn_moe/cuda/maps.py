"""Tensor maps (cuda.core's TensorMapDescriptor): how Hopper's copy engine reads a tensor. Kept as long as it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..contract import Experts
from .jit import build


def maps_of(experts: Experts) -> tuple[Any, Any]:
    """Maps of gate_up and down. A box is 128 rows by 64 elements of the sum."""
    interleaved = experts.gate_up_order == "interleaved"
    gate_up, down = experts.tensors["gate_up"], experts.tensors["down"]
    return (
        _kept(gate_up, interleaved, lambda: _gate_up(gate_up, interleaved)),
        _kept(down, False, lambda: _map(down, (1, 128, 64))),
    )


def mxfp4_maps_of(experts: Experts) -> tuple[Any, Any]:
    """Maps of gate_up_blocks and down_blocks. A box is 128 rows by 128 bytes: see sm90/mxfp4_mlp.cu."""
    interleaved = experts.gate_up_order == "interleaved"
    gate_up, down = experts.tensors["gate_up_blocks"], experts.tensors["down_blocks"]
    return (
        _kept(gate_up, interleaved, lambda: _mxfp4_gate_up(gate_up, interleaved)),
        _kept(down, False, lambda: _mxfp4_down(down)),
    )


def linear_map(weight: Tensor) -> Any:
    """Map of a linear layer's weight [N, K]. A box is 64 rows by 64 elements of the sum."""
    return _kept(weight, False, lambda: _map(weight, (64, 64)))


def rows_map(x: Tensor, rows: int) -> Any:
    """Map of a linear layer's input [T, K]. A box is `rows` rows by 64 elements of the sum; rows past T are zeros."""
    return _map(x, (rows, 64))


def cache_map(kept: Tensor, keys: int) -> Any:
    """Map of a layer's keys or values [rows or pages, kv_heads, tokens, head_dim].

    A box is `keys` tokens of one head by 64 elements.
    """
    return _kept(kept, keys, lambda: _map(kept, (1, 1, keys, 64)))


# by id of a tensor. A map of cuda.core keeps the memory alive that it describes, so each map goes with its tensor.
_KEPT: dict[int, tuple[weakref.ref[Tensor], tuple[object, ...], Any]] = {}


def _kept(tensor: Tensor, kind: object, make: Callable[[], Any]) -> Any:
    name = id(tensor)
    # an optimizer, a load or a move may have put other memory under the same tensor
    key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, kind)
    found = _KEPT.get(name)
    if found is None or found[1] != key:
        found = _KEPT[name] = (weakref.ref(tensor, lambda _: _KEPT.pop(name, None)), key, make())
    return found[2]


def _gate_up(weight: Tensor, interleaved: bool) -> Any:
    """[E, I/8, 2, 8, H]: a box is eight times eight gate rows and eight up rows."""
    E, rows, H = weight.shape
    I = rows // 2
    steps = (16 * H, H, 2 * H) if interleaved else (8 * H, I * H, H)
    return _map(weight.detach().as_strided((E, I // 8, 2, 8, H), (2 * I * H, *steps, 1)), (1, 8, 2, 8, 64))


def _mxfp4_gate_up(blocks: Tensor, interleaved: bool) -> Any:
    """[E, 2, I/32, 32, H/2]: a box is 16 rows of each of four times 32 gate rows, then the same up rows."""
    E, rows, width = blocks.shape
    I = rows // 2
    steps = (width, 64 * width, 2 * width) if interleaved else (I * width, 32 * width, width)
    view = blocks.detach().as_strided((E, 2, I // 32, 32, width), (2 * I * width, *steps, 1))
    return _map(view, (1, 2, 4, 16, 128))


def _mxfp4_down(blocks: Tensor) -> Any:
    """[E, H/8, 2, 4, I/2]: of eight rows a box has the even ones first, since lanes that load together read row r and
    r + 1, and the swizzle keeps rows apart that differ by four."""
    E, H, width = blocks.shape
    view = blocks.detach().as_strided((E, H // 8, 2, 4, width), (H * width, 8 * width, width, 2 * width, 1))
    return _map(view, (1, 16, 2, 4, 128))


def _map(view: Tensor, box: tuple[int, ...]) -> Any:
    build.cuda_core()
    from cuda.core._tensor_map import TensorMapSwizzle
    from cuda.core.utils import StridedMemoryView

    # detached, since a map of the tensor itself would keep that tensor alive
    strided = StridedMemoryView.from_any_interface(view.detach(), stream_ptr=-1)
    return strided.as_tensor_map(box_dim=box, swizzle=TensorMapSwizzle.SWIZZLE_128B)
