"""The operator inside transformers: importing this package registers the experts implementation "ttnn_moe".

    import ttnn_moe.hf  # or ttnn_moe.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="ttnn_moe")

On a model that is loaded already: `model.set_experts_implementation("ttnn_moe")`.
"""

from __future__ import annotations

import re

from ...errors import TtnnMoeError
from ...visible import said

# the first whose models take the name of a registered experts implementation
MIN_TRANSFORMERS = (5, 7)


class TransformersUnsuitable(TtnnMoeError, ImportError):
    """transformers is missing, broken or too old for this package."""


def _require_transformers() -> None:
    at_least = ".".join(map(str, MIN_TRANSFORMERS))
    remedy = f"pip install -U 'transformers>={at_least}'"
    try:
        import transformers
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "transformers"
        raise TransformersUnsuitable(
            "ttnn_moe.hf needs transformers, which is not installed" if missing else "transformers cannot be imported",
            got=None if missing else said(error),
            expected=f"transformers >= {at_least}",
            remedy=remedy,
        ) from error
    found = tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2]))
    if found < MIN_TRANSFORMERS:
        raise TransformersUnsuitable(
            "transformers is too old: its models take no experts implementation but its own",
            got=transformers.__version__,
            expected=f">= {at_least}",
            remedy=remedy,
        )


_require_transformers()

from . import checkpoints, kv  # noqa: E402
from .experts import served  # noqa: E402
from .kv import BucketedCache  # noqa: E402
from .plug import register  # noqa: E402

__all__ = ["BucketedCache", "MIN_TRANSFORMERS", "TransformersUnsuitable", "register", "served"]

register()
kv.register()
checkpoints.register()
