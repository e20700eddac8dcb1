"""Tensor maps: how Hopper's copy engine reads weights, keys and values. Kept as long as these."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..contract import Experts


@dataclass(frozen=True)
class WeightMaps:
    """cuda.core's TensorMapDescriptor of both weights; 128 rows by 64 elements of the sum a box."""

    gate_up: Any
    down: Any


def maps_of(experts: Experts) -> WeightMaps:
    interleaved = experts.gate_up_order == "interleaved"
    gate_up, down = experts.tensors["gate_up"], experts.tensors["down"]
    return WeightMaps(
        _kept(gate_up, interleaved, lambda: _gate_up(gate_up, interleaved)),
        _kept(down, False, lambda: _map(down, (1, 128, 64))),
    )


def linear_map(weight: Tensor) -> Any:
    """Of a linear layer's weight [N, K]: 64 rows by 64 elements of the sum a box."""
    return _kept(weight, False, lambda: _map(weight, (64, 64)))


def cache_map(kept: Tensor, keys: int) -> Any:
    """Of a layer's keys or values [rows or pages, kv heads, tokens, head_dim]: so many tokens of a head by 64 elements
    a box."""
    return _kept(kept, keys, lambda: _map(kept, (1, 1, keys, 64)))


# by id of a tensor. cuda.core's maps keep the memory that they describe alive, so that each goes with its tensor: else
# weights would never be freed.
_KEPT: dict[int, tuple[weakref.ref[Tensor], tuple[object, ...], Any]] = {}


def _kept(tensor: Tensor, kind: object, make: Callable[[], Any]) -> Any:
    name = id(tensor)
    # an optimizer, a load or a move may have put other memory under the same tensor
    key = (tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.device, kind)
    found = _KEPT.get(name)
    if found is None or found[1] != key:
        found = _KEPT[name] = (weakref.ref(tensor, lambda _: _KEPT.pop(name, None)), key, make())
    return found[2]


def _gate_up(weight: Tensor, interleaved: bool) -> Any:
    """[E, I/8, 2, 8, H]: a box is eight times eight gate rows and eight up rows."""
    E, rows, H = weight.shape
    I = rows // 2
    if interleaved:
        view = weight.detach().as_strided((E, I // 8, 2, 8, H), (2 * I * H, 16 * H, H, 2 * H, 1))
    else:
        view = weight.detach().as_strided((E, I // 8, 2, 8, H), (2 * I * H, 8 * H, I * H, H, 1))
    return _map(view, (1, 8, 2, 8, 64))


def _map(view: Tensor, box: tuple[int, ...]) -> Any:
    from cuda.core._tensor_map import TensorMapSwizzle
    from cuda.core.utils import StridedMemoryView

    # detached: not the tensor itself, which would then never die
    strided = StridedMemoryView.from_any_interface(view.detach(), stream_ptr=-1)
    return strided.as_tensor_map(box_dim=box, swizzle=TensorMapSwizzle.SWIZZLE_128B)
