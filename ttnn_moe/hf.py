"""ttnn_moe.hf: a short name of ttnn_moe.integrations.transformers, its modules included."""

from __future__ import annotations

import sys

from .integrations import transformers
from .integrations.transformers import (
    MIN_TRANSFORMERS,
    BucketedCache,
    TransformersUnsuitable,
    experts,
    gate,
    kv,
    plug,
    register,
    served,
)

__all__ = ["BucketedCache", "MIN_TRANSFORMERS", "TransformersUnsuitable", "register", "served"]

# the same module objects: a second copy would register its custom ops a second time
for _module in (transformers, experts, gate, kv, plug):
    sys.modules[_module.__name__.replace(transformers.__name__, __name__)] = _module
