"""MXFP4 parameters of a vLLM layer whose bytes have the order of this GPU's kernels, `mxfp4_boxes`.

A parameter says for itself whether it is arranged. A reload of vLLM's fills other tensors with the checkpoint's bytes,
has them processed as at load, and copies them over the parameters, where captured graphs read them. A weight loader
called by somebody else writes arranged bytes into an arranged parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from ...formats import mxfp4, mxfp4_boxes
from ...formats.in_place import Mark, no_mark

_MARK = "ttnn_moe_arranged"


@dataclass(frozen=True)
class Kind:
    """What a parameter holds.

    Attributes:
        tensor: the format's name of it. order: gate_up_order of its experts.
    """

    tensor: str
    order: str = "halves"

    def reorder(self, tensor: Tensor, inverse: bool, mark: Mark = no_mark) -> None:
        """From the checkpoint's bytes to arranged ones, in place, or back."""
        mxfp4_boxes.reorder_tensor(self.tensor, tensor, self.order, inverse, mark)


def is_arranged(parameter: Tensor) -> bool:
    return getattr(parameter, _MARK, None) is not None


def arrange(parameter: Tensor, kind: Kind) -> None:
    """Arrange a parameter in place, unless it is."""
    if not is_arranged(parameter):
        kind.reorder(parameter.data, False, lambda done: setattr(parameter, _MARK, kind if done else None))


def restore(parameter: Tensor) -> None:
    """Bring the checkpoint's bytes back into an arranged parameter, in place."""
    kind: Kind = getattr(parameter, _MARK)
    kind.reorder(parameter.data, True, lambda there: setattr(parameter, _MARK, kind if there else None))


def fill(parameter: Tensor, loaded: Tensor, name: str) -> None:
    """Copy a tensor with a checkpoint's bytes into a parameter. name: for errors.

    Raises:
        ContractError: a scale for an arranged parameter is no number.
    """
    if is_arranged(parameter):
        kind: Kind = getattr(parameter, _MARK)
        if kind.tensor.endswith("_scales"):
            mxfp4.check_scales(**{name: loaded})
        loaded = loaded.to(parameter.device, copy=True).contiguous()
        kind.reorder(loaded, inverse=False)
    parameter.data.copy_(loaded)


def checkpoint_bytes(parameter: Tensor) -> Tensor:
    """A copy of an arranged parameter with the checkpoint's bytes."""
    copy = parameter.data.clone()
    getattr(parameter, _MARK).reorder(copy, inverse=True)
    return copy


def restore_state(layer: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Hook of a state dict: arranged parameters are in it as copies with the checkpoint's bytes."""
    for name, parameter in layer.named_parameters(recurse=False):
        if is_arranged(parameter):
            state[prefix + name] = checkpoint_bytes(parameter)


def follow(layer: Any, parameter: torch.nn.Parameter, name: str) -> None:
    """Have vLLM's weight loader of a whole parameter write the checkpoint's bytes, arranged or not. name: for errors.

    What the checkpoint does not fill becomes zeros: a reload of vLLM's begins with memory that nobody wrote.
    """
    theirs = _of_layer(layer, parameter.weight_loader)  # type: ignore[attr-defined]

    # a reload asks for the loader's name, and exchanges its argument `param`
    def weight_loader(layer: Any, param: Tensor, loaded_weight: Tensor, *args: Any, **options: Any) -> Any:
        whole = param
        if is_arranged(param):
            whole = torch.nn.Parameter(torch.empty_like(param.data), requires_grad=False)
        if loaded_weight.shape != param.shape:
            whole.data.zero_()
        done = theirs(layer, whole, loaded_weight, *args, **options)
        if whole is not param:
            fill(param, whole.data, name)
        return done

    # bound to the layer, as vLLM's own: what vLLM keeps for reloads forgets layers of bound loaders alone
    parameter.weight_loader = MethodType(weight_loader, layer)  # type: ignore[attr-defined]


def _of_layer(layer: Any, loader: Any) -> Any:
    """A weight loader as a function of a layer too, which does not keep the layer whose method it is."""
    if getattr(loader, "__self__", None) is layer:
        return loader.__func__
    return lambda layer, *args, **options: loader(*args, **options)
