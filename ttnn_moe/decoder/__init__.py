"""The small operators of a decoder layer: what a model calls around attention and experts.

Each is defined in plain torch (torch_forms.py) and has families of kernels (operators.py). They serve CUDA tensors on
sm_80 or newer where triton is installed, and with TRITON_INTERPRET=1 tensors on the CPU that are not bf16.
"""

from ..choice import plain
from ..draws import Draw
from .operators import (
    draw_tokens,
    linear,
    linear_add,
    norm_linear,
    norm_route,
    rms_norm,
    route,
    uses_kernels,
    why_not_captured,
)
from .torch_forms import head_norm_rope
from .why import Why, why

__all__ = [
    "Draw",
    "Why",
    "draw_tokens",
    "head_norm_rope",
    "linear",
    "linear_add",
    "norm_linear",
    "norm_route",
    "plain",
    "rms_norm",
    "route",
    "uses_kernels",
    "why",
    "why_not_captured",
]
