"""The sizes and types of one call of the operator."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from .activations import ACTIVATIONS, SILU
from .errors import ContractError
from .experts import GATE_UP_ORDERS, Experts
from .formats.int4_24 import NAME as INT4_24
from .placement import check_even
from .visible import shown

MOST_PAIRS = 2**31 - 1
"""Token-expert pairs of a call: every view of a routing numbers them in int32."""
HIDDEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAKES = {
    "Routing": "Routing.from_topk(topk_ids, topk_weights, E)",
    "Experts": "Experts.dense(gate_up, down), Experts.int4_24 or Experts.mxfp4",
}
"""What makes an argument of each kind."""


@dataclass(frozen=True)
class Problem:
    """What a backend must know to choose and to plan: sizes and formats known on the host, no tensor.

    Attributes:
        T: tokens, or a bound on them. E, K, H, I: sizes of the layer (E counts the experts of all devices).
        dtype: of hidden. out_dtype: of the output, dtype or fp32.
        weight_format, gate_up_order: format and gate_up_order of the Experts.
        device: device type of the tensors ("cpu", "cuda", ...); a torch.device and "cuda:1" become their type.
        D: devices that share the experts.
        activation, biased: of the Experts.
        fp16_scales: of the Experts, where the format is int4_24.

    Raises:
        ContractError: sizes, dtypes, names of formats or a D that no call can have.
    """

    T: int
    E: int
    K: int
    H: int
    I: int
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    weight_format: str = "dense"
    gate_up_order: str = "halves"
    device: str = "cpu"
    D: int = 1
    activation: str = SILU
    biased: bool = False
    fp16_scales: bool = True

    def __post_init__(self) -> None:
        sizes = self.T, self.E, self.K, self.H, self.I, self.D
        if {*map(type, sizes)} != {int} and not all(map(_is_integer, sizes)):
            got = ", ".join(f"{name}={shown(size)}" for name, size in zip("TEKHID", sizes, strict=True))
            raise ContractError("sizes are no integers", got=got, expected="T, E, K, H, I and D as int")
        if self.T < 0 or min(sizes[1:]) < 1:
            raise ContractError("sizes are out of range", got=self, expected="T >= 0 and E, K, H, I, D >= 1")
        if self.dtype not in HIDDEN_DTYPES:
            raise ContractError("hidden has an unsupported dtype", got=self.dtype, expected=list(HIDDEN_DTYPES))
        if self.out_dtype is None:
            object.__setattr__(self, "out_dtype", self.dtype)
        if self.out_dtype not in (self.dtype, torch.float32):
            raise ContractError("out has the wrong dtype", got=self.out_dtype, expected=or_float32(self.dtype))
        check_even(self.E, self.D)
        if type(self.device) is not str or ":" in self.device:
            object.__setattr__(self, "device", _device_type(self.device))
        if self.activation not in ACTIVATIONS or self.gate_up_order not in GATE_UP_ORDERS:
            got, known = (f"activation={shown(self.activation)}", ACTIVATIONS)
            if self.activation in ACTIVATIONS:
                got, known = (f"gate_up_order={shown(self.gate_up_order)}", GATE_UP_ORDERS)
            raise ContractError("experts have no such form", got=got, expected=f"one of {list(known)}")
        if not isinstance(self.weight_format, str):
            raise ContractError("weight_format is no name", got=shown(self.weight_format), expected="a name")

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={getattr(self, name)}" for name in ("T", "E", "K", "H", "I"))
        devices = self.device if self.D == 1 else f"{self.D} {self.device}"
        kind = f"{str(self.dtype).removeprefix('torch.')}, {self.weight_format} weights"
        kind += ", biases" * self.biased + f", {self.activation}" * (self.activation != SILU)
        return f"{sizes}, {kind}, on {devices}"

    def beyond_silu(self) -> str | None:
        """Why kernels that compute silu(gate) * up without biases do not run this problem, or None."""
        if self.activation != SILU:
            return f"it computes silu(gate) * up, not {self.activation!r}"
        return "it adds no biases" if self.biased else None

    @classmethod
    def of(
        cls, T: int, K: int, experts: Experts, dtype: torch.dtype, out_dtype: torch.dtype | None = None, D: int = 1
    ) -> Problem:
        """The problem of T tokens, K experts each, on these experts (all E of them).

        Raises:
            ContractError: no Experts, or sizes or dtypes that no call can have.
        """
        check_kind(experts, Experts)
        return cls(
            T,
            experts.E,
            K,
            experts.H,
            experts.I,
            dtype,
            out_dtype,
            experts.format,
            experts.gate_up_order,
            experts.device.type,
            D,
            experts.activation,
            experts.biased,
            experts.fp16_scales or experts.format != INT4_24,
        )


def too_many_pairs(problem: Problem) -> str | None:
    """Why no view of a routing can number the problem's pairs; None: it can."""
    if problem.T * problem.K <= MOST_PAIRS:
        return None
    pairs = shown(problem.T * problem.K)
    return f"it has T * K = {pairs} token-expert pairs, more than the {MOST_PAIRS} that int32 counts"


def _device_type(device: object) -> str:
    """The type of a torch.device, or of a text such as "cuda:1"."""
    kind = device.type if isinstance(device, torch.device) else device
    if not isinstance(kind, str):
        raise ContractError("device is no device type", got=shown(device), expected="a text, as 'cpu' or 'cuda'")
    return kind.partition(":")[0]


def _is_integer(size: object) -> bool:
    """Also one of numpy, or of a traced call, which is refused in words later; True and False are none."""
    if isinstance(size, Tensor):
        return torch.jit.is_tracing()  # type: ignore[no-untyped-call]
    return isinstance(size, (Integral, torch.SymInt)) and not isinstance(size, bool)


def check_kind(value: object, kind: type) -> None:
    """An argument must be one of this package's own kinds."""
    if not isinstance(value, kind):
        raise ContractError(
            f"no {kind.__name__}",
            got=shown(value),
            expected=f"a ttnn_moe.{kind.__name__}",
            remedy=_MAKES.get(kind.__name__),
        )


def or_float32(dtype: torch.dtype) -> str:
    """The dtypes that a result may have beside hidden of this dtype, in words."""
    return str(torch.float32) if dtype == torch.float32 else f"{dtype} or {torch.float32}"
