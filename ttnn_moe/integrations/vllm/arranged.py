"""MXFP4 parameters of a vLLM layer whose bytes have the order of this GPU's kernels, `mxfp4_boxes`.

A parameter says for itself whether it is arranged. A reload of vLLM's fills other tensors with the checkpoint's bytes,
has them processed as at load, and copies them over the parameters, where captured graphs read them. A weight loader
called by somebody else writes arranged bytes into an arranged parameter.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ...formats import mxfp4, mxfp4_boxes
from ...formats.in_place import Mark, no_mark

_MARK = "ttnn_moe_arranged"
_ORDER = "halves"


def is_arranged(parameter: Tensor) -> bool:
    return getattr(parameter, _MARK, False)


def arrange(parameter: Tensor, name: str) -> None:
    """Arrange a parameter in place, unless it is. name: in a checkpoint."""
    if not is_arranged(parameter):
        _reorder(parameter.data, name, inverse=False, mark=partial(setattr, parameter, _MARK))


def fill(parameter: Tensor, loaded: Tensor, name: str) -> None:
    """Copy a tensor with a checkpoint's bytes into a parameter.

    Raises:
        ContractError: a scale for an arranged parameter is no number.
    """
    if is_arranged(parameter):
        if name.endswith("_scales"):
            mxfp4.check_scales(**{name: loaded})
        loaded = loaded.to(parameter.device, copy=True).contiguous()
        _reorder(loaded, name, inverse=False)
    parameter.data.copy_(loaded)


def restore_state(layer: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Hook of a state dict: arranged parameters are in it as copies with the checkpoint's bytes."""
    for name, parameter in layer.named_parameters(recurse=False):
        if is_arranged(parameter):
            state[prefix + name] = parameter.data.clone()
            _reorder(state[prefix + name], name, inverse=True)


def _reorder(tensor: Tensor, name: str, inverse: bool, mark: Mark = no_mark) -> None:
    mxfp4_boxes.reorder_tensor(name.replace("_proj_", "_"), tensor, _ORDER, inverse, mark)
