"""ttnn-moe: one Mixture-of-Experts operator, one interface, several machines."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from . import logs

if TYPE_CHECKING:
    from .api import down_projection, gate_projection, gate_up, moe, prepare, silu_mul, up_projection
    from .arranging import arrange, restore
    from .contract import Experts, Placement, Problem, Routing
    from .errors import BackendUnavailable, CheckpointError, ContractError, GradientsRefused, RequestError, TtnnMoeError
    from .registry import why

__version__ = "0.1.0"

logs.setup()

__all__ = [
    "BackendUnavailable",
    "CheckpointError",
    "ContractError",
    "Experts",
    "GradientsRefused",
    "Placement",
    "Problem",
    "RequestError",
    "Routing",
    "TtnnMoeError",
    "arrange",
    "down_projection",
    "gate_projection",
    "gate_up",
    "moe",
    "prepare",
    "restore",
    "silu_mul",
    "up_projection",
    "why",
]

# Names come when they are first used: torch takes seconds, and the command line must be able to answer meanwhile.
_PLACES = {
    **dict.fromkeys(
        ("BackendUnavailable", "CheckpointError", "ContractError", "GradientsRefused", "RequestError", "TtnnMoeError"),
        "errors",
    ),
    **dict.fromkeys(("Experts", "Placement", "Problem", "Routing"), "contract"),
    **dict.fromkeys(("arrange", "restore"), "arranging"),
    "why": "registry",
}
_MODULES = "api backend contract eager errors experts formats placement registry routing selfcheck".split()


def __getattr__(name: str) -> object:
    if name in __all__:
        value = getattr(importlib.import_module(f".{_PLACES.get(name, 'api')}", __name__), name)
    elif name in _MODULES:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
