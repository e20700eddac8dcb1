"""Tensor maps of an experts' weights: how Hopper's copy engine reads them. Made once, kept as long as the tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...contract import Experts


@dataclass(frozen=True)
class WeightMaps:
    """cuda.core's TensorMapDescriptor of both weights; 128 rows by 64 elements of the sum a box."""

    gate_up: Any
    down: Any


# by address: an Experts, and its tensors, may be made anew around the same weights on every call. An entry says
# everything about how the addresses are read, so one that outlives its weights does no harm; the oldest go.
_KEPT: dict[tuple[object, ...], WeightMaps] = {}
_MOST = 1024


def maps_of(experts: Experts) -> WeightMaps:
    gate_up, down = experts.tensors["gate_up"], experts.tensors["down"]
    order = experts.gate_up_order
    key = (gate_up.data_ptr(), down.data_ptr(), gate_up.shape, down.shape, gate_up.dtype, gate_up.device.index, order)
    maps = _KEPT.get(key)
    if maps is None:
        if len(_KEPT) >= _MOST:
            _KEPT.pop(next(iter(_KEPT)))
        maps = _KEPT[key] = WeightMaps(_gate_up(gate_up, order == "interleaved"), _map(down, (1, 128, 64)))
    return maps


def _gate_up(weight: Tensor, interleaved: bool) -> Any:
    """[E, I/8, 2, 8, H]: a box is eight times eight gate rows and eight up rows."""
    E, rows, H = weight.shape
    I = rows // 2
    if interleaved:
        view = weight.as_strided((E, I // 8, 2, 8, H), (2 * I * H, 16 * H, H, 2 * H, 1))
    else:
        view = weight.as_strided((E, I // 8, 2, 8, H), (2 * I * H, 8 * H, I * H, H, 1))
    return _map(view, (1, 8, 2, 8, 64))


def _map(view: Tensor, box: tuple[int, ...]) -> Any:
    from cuda.core._tensor_map import TensorMapSwizzle
    from cuda.core.utils import StridedMemoryView

    strided = StridedMemoryView.from_any_interface(view.detach(), stream_ptr=-1)
    return strided.as_tensor_map(box_dim=box, swizzle=TensorMapSwizzle.SWIZZLE_128B)
