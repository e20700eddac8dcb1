"""Putting the operator on the list of transformers' experts implementations."""

from __future__ import annotations

from transformers.integrations import finegrained_fp8
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from ... import registry
from ...errors import ContractError
from ...visible import shown
from . import mxfp4
from .experts import experts_forward

NAME = "ttnn_moe"


def register(name: str = NAME, *, backend: str = registry.AUTO) -> None:
    """Make `experts_implementation=name` run ttnn_moe.moe on one backend.

    Args:
        name: what models ask for. A second call with one of our names replaces its backend.
        backend: a name in registry.backends(); or "auto": then TTNN_MOE_BACKEND, else the first that can run on the
            device of the weights.

    Raises:
        ContractError: name is no name, or one of transformers' own. BackendUnavailable: the backend is not here.
    """
    if not isinstance(name, str) or not name:
        raise ContractError("no name of an experts implementation", got=shown(name), expected="a text")
    if name == "eager" or (name in ALL_EXPERTS_FUNCTIONS and not mxfp4.is_ours(name)):
        raise ContractError(
            "an experts implementation of that name is there already",
            got=repr(name),
            expected="a new name",
            remedy=f"ttnn_moe.hf.register('{NAME}_{backend}', backend={backend!r})",
        )
    if backend != registry.AUTO:
        registry.resolve(backend)
    forward = experts_forward(name, backend)
    ExpertsInterface.register(name, forward)
    mxfp4.register()
    # models with FP8 experts look names up in a list of their own: there we say why they are not served
    fp8 = getattr(finegrained_fp8, "FP8ExpertsInterface", None)
    if fp8 is not None:
        fp8.register(name, forward)
