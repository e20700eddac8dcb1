"""ttnn-moe: one Mixture-of-Experts operator, one interface, several machines."""

from . import logs
from .api import down_projection, gate_projection, gate_up, moe, prepare, silu_mul, up_projection
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
    "down_projection",
    "gate_projection",
    "gate_up",
    "moe",
    "prepare",
    "silu_mul",
    "up_projection",
    "why",
]
