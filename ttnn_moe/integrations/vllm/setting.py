"""Variables: how much of a model this package runs inside vLLM, and on which backend."""

from __future__ import annotations

import os

from ... import registry
from ...errors import ContractError
from ...visible import shown

ENV = "TTNN_MOE_VLLM"
OFF, EXPERTS, MODEL = "off", "experts", "model"
LEVELS = (OFF, EXPERTS, MODEL)
DEFAULT = EXPERTS


def level() -> str:
    """One of LEVELS.

    Raises:
        ContractError: another value.
    """
    given = os.environ.get(ENV) or DEFAULT
    if given.lower() not in LEVELS:
        raise ContractError(
            f"{ENV} has no such value",
            got=shown(given),
            expected=f"one of {', '.join(LEVELS)}",
            remedy=f"unset {ENV}; until then vLLM runs all layers itself",
        )
    return given.lower()


def names_backend() -> bool:
    """Whether TTNN_MOE_BACKEND names a backend. "auto" is no name: vLLM's kernels are faster than the reference."""
    return os.environ.get(registry.ENV, "") not in ("", registry.AUTO)
