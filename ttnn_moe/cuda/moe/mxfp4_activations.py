"""The format in which products of MXFP4 experts read tokens and activations; TTNN_MOE_MXFP4_ACTIVATIONS names one.

On compute capability 12.x the default is MXFP8. Other GPUs have kernels of bf16 alone.
"""

from __future__ import annotations

import os

from ...errors import ContractError
from ...formats.mxfp4 import NAME

ENV = "TTNN_MOE_MXFP4_ACTIVATIONS"
BF16, MXFP8, MXFP4 = "bf16", "mxfp8", NAME
FORMATS = (BF16, MXFP8, MXFP4)


def why_not_read(activations: str) -> str | None:
    """Why kernels that read activations in this format do not run, or None: FP4 has to be asked for.

    Raises:
        ContractError: TTNN_MOE_MXFP4_ACTIVATIONS names no format.
    """
    asked = os.environ.get(ENV)
    if asked and asked not in FORMATS:
        raise ContractError(
            f"{ENV} names no format",
            got=repr(asked),
            expected=f"one of {list(FORMATS)}",
            remedy=f"unset {ENV}: mxfp8 is the default on compute capability 12.x, bf16 elsewhere",
        )
    if asked:
        return None if asked == activations else f"it reads {activations} activations, and {ENV} asks for {asked}"
    return f"it rounds activations to FP4; to ask for that: {ENV}={MXFP4}" if activations == MXFP4 else None
