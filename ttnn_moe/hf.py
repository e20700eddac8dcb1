"""ttnn_moe.hf: a short name of ttnn_moe.integrations.transformers, its modules included."""

from __future__ import annotations

import sys

from .integrations import transformers
from .integrations.transformers import MIN_TRANSFORMERS, BucketedCache, TransformersUnsuitable, register, served

__all__ = ["BucketedCache", "MIN_TRANSFORMERS", "TransformersUnsuitable", "register", "served"]

# the same module objects: a second copy would register its custom ops a second time
for _name, _module in list(sys.modules.items()):
    if _name == transformers.__name__ or _name.startswith(f"{transformers.__name__}."):
        sys.modules[_name.replace(transformers.__name__, __name__)] = _module
