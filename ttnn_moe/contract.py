"""The operator's contract: every shape and dtype rule, checked once per call on the host, without a device sync.

    out[t] = sum over k of  w[t,k] * (silu(x[t] Wg_e) * (x[t] Wu_e)) Wd_e,   e = ids[t,k],  silu(z) = z / (1 + exp(-z))

Experts may have biases and another activation: see `Experts` and `activations.py`.

Names: T tokens, E experts, K experts per token, H hidden size, I expert intermediate size, D devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from .activations import ACTIVATIONS, SILU
from .errors import ContractError
from .experts import GATE_UP_ORDERS, Experts
from .formats.int4_24 import NAME as INT4_24
from .memory import check_tensors, first_shared
from .placement import Placement, check_even
from .routing import Routing
from .routing_views import PaddedView, SortedView, StepLayout, step_capacity
from .visible import shown

__all__ = [
    "MOST_PAIRS",
    "Experts",
    "PaddedView",
    "Placement",
    "Problem",
    "Routing",
    "SortedView",
    "StepLayout",
    "check",
    "check_accumulate",
    "check_memory",
    "check_down_projection",
    "check_gate_and_up",
    "check_hidden",
    "check_kind",
    "check_kinds",
    "check_out",
    "check_prepared",
    "check_rows_and_out",
    "or_float32",
    "step_capacity",
    "too_many_pairs",
]

MOST_PAIRS = 2**31 - 1
"""Token-expert pairs of a call: every view of a routing numbers them in int32."""
HIDDEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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


def check(hidden: Tensor, routing: Routing, experts: Experts, out: Tensor | None = None) -> Problem:
    """Check one call and describe it. Never reads a tensor's values.

    Raises:
        ContractError: naming what is wrong, what was expected, and the remedy.
    """
    check_hidden(hidden, routing, experts)
    if out is not None:
        check_out(out, hidden, routing.T, experts.H)
    return Problem.of(routing.T, routing.K, experts, hidden.dtype, None if out is None else out.dtype)


def check_rows_and_out(rows: object, out: object) -> None:
    """The rows must be a tensor, and out too where it is given."""
    if not (type(rows) is Tensor and (out is None or type(out) is Tensor)):
        check_tensors(hidden=rows, **({} if out is None else {"out": out}))


def check_kinds(rows: object, routing: object, experts: object, out: object) -> None:
    """The arguments of a call must be tensors, a Routing and Experts."""
    check_rows_and_out(rows, out)
    check_kind(routing, Routing)
    check_kind(experts, Experts)


_MAKES = {
    "Routing": "Routing.from_topk(topk_ids, topk_weights, E)",
    "Experts": "Experts.dense(gate_up, down), Experts.int4_24 or Experts.mxfp4",
}
"""What makes an argument of each kind."""


def check_kind(value: object, kind: type) -> None:
    """An argument must be one of this package's own kinds."""
    if not isinstance(value, kind):
        raise ContractError(
            f"no {kind.__name__}",
            got=shown(value),
            expected=f"a ttnn_moe.{kind.__name__}",
            remedy=_MAKES.get(kind.__name__),
        )


def check_hidden(hidden: Tensor, routing: Routing, experts: Experts) -> None:
    """hidden [T, H] must fit the routing and the experts, in sizes, dtype and device."""
    shape = routing.T, experts.H
    if hidden.shape != shape:
        raise ContractError(
            "hidden has the wrong shape",
            got=tuple(hidden.shape),
            expected=f"[T, H] = {shape}",
            remedy=_remedy_of_shape(hidden, experts.H, experts.I),
        )
    _check_together("hidden", hidden, routing, experts)


def _remedy_of_shape(hidden: Tensor, H: int, I: int) -> str | None:
    """For hidden that is not [T, H], with experts of these sizes."""
    if hidden.dim() == 3:
        return "flatten batch and sequence to T: hidden.reshape(-1, H)"
    if hidden.dim() == 2 and hidden.shape[1] == I != H:
        return (
            f"H={H} and I={I} of the experts look exchanged; Experts.from_projections takes gate and up [E, H, I] and "
            "down [E, I, H]: give it weights of nn.Linear as weight.transpose(1, 2)"
        )
    return None


def check_down_projection(
    activations: Tensor, routing: Routing, experts: Experts, row_align: int, out: Tensor | None, accumulate: bool
) -> Problem:
    """Check a down projection: activations [capacity, I], and the rest as `check`. Returns its problem."""
    shape = step_capacity(routing.T, routing.K, routing.E, row_align), experts.I
    if tuple(activations.shape) != shape:
        raise ContractError(
            "activations have the wrong shape",
            got=tuple(activations.shape),
            expected=f"[capacity, I] = {shape}",
            remedy="take the row_align of the step that made them",
        )
    _check_together("activations", activations, routing, experts)
    check_accumulate(out, accumulate)
    if out is not None:
        check_out(out, activations, routing.T, experts.H)
    return Problem.of(routing.T, routing.K, experts, activations.dtype, None if out is None else out.dtype)


def _check_together(name: str, rows: Tensor, routing: Routing, experts: Experts) -> None:
    """Rows, routing and experts must agree on dtype, E and device."""
    dtype, weights_dtype = rows.dtype, experts.dtype
    if dtype not in HIDDEN_DTYPES:
        raise ContractError(f"{name} has an unsupported dtype", got=dtype, expected=list(HIDDEN_DTYPES))
    if weights_dtype is not None and dtype != weights_dtype:
        raise ContractError(
            f"{name} and the expert weights have different dtypes",
            got=f"{dtype} and {weights_dtype}",
            expected="one dtype",
            remedy=f"{name}.to({weights_dtype})",
        )
    if routing.E != experts.E:
        raise ContractError(
            "routing and experts disagree on E",
            got=f"{routing.E} and {experts.E}",
            expected="the same number of experts",
            remedy="Routing.for_device and Experts.for_device go together",
        )
    if not rows.device == routing.topk_ids.device == experts.device:
        raise ContractError(
            "tensors are on different devices",
            got=f"{name} {rows.device}, topk_ids {routing.topk_ids.device}, experts {experts.device}",
            expected="one device",
        )


def check_out(out: Tensor, rows: Tensor, T: int, H: int) -> None:
    """out [T, H] must be writable in place: device of rows, their dtype or fp32, contiguous."""
    if out.layout is not torch.strided:
        raise ContractError("out is not dense", got=out.layout, expected="row-major [T, H]")
    if out.shape != (T, H) or out.device != rows.device:
        raise ContractError(
            "out has the wrong shape or device",
            got=f"{tuple(out.shape)} on {out.device}",
            expected=f"{(T, H)} on {rows.device}",
        )
    if out.dtype not in (rows.dtype, torch.float32):
        raise ContractError("out has the wrong dtype", got=out.dtype, expected=or_float32(rows.dtype))
    if not out.is_contiguous():
        raise ContractError("out is not contiguous", got=f"strides {out.stride()}", expected="row-major [T, H]")


def or_float32(dtype: torch.dtype) -> str:
    """The dtypes that a result may have beside hidden of this dtype, in words."""
    return str(torch.float32) if dtype == torch.float32 else f"{dtype} or {torch.float32}"


def check_memory(out: Tensor, routing: Routing, *read: Tensor) -> None:
    """A kernel must be able to write to out, and out must share no memory with what the call reads.

    It reads addresses, so it is for calls that run now, not for traced ones. read: contiguous tensors.
    """
    if out.is_neg():
        raise ContractError("out is a negative view of other values", remedy="pass a plain tensor")
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ContractError(
            "out was made under torch.inference_mode, and the call is outside it",
            expected="an out that autograd may see written",
            remedy="make out outside inference_mode, or call inside it",
        )
    bound = () if routing.num_tokens is None else (routing.num_tokens,)
    shared = first_shared(out, *read, routing.topk_ids, routing.topk_weights, *bound)
    if shared is not None:
        raise ContractError(
            "out shares memory with an argument",
            got=f"one that is {tuple(shared.shape)} {shared.dtype}",
            expected="separate memory",
            remedy="pass another out, or none",
        )


def check_prepared(
    problem: Problem, device: torch.device, hidden: Tensor, routing: Routing, out: Tensor | None, accumulate: bool
) -> None:
    """What a prepared layer checks on every call, but for `check_memory`. device: that of its experts."""
    T, K = routing.topk_ids.shape
    if hidden.shape != (T, problem.H) or hidden.dtype != problem.dtype:
        raise ContractError(
            "hidden does not fit the prepared problem",
            got=f"{tuple(hidden.shape)} {hidden.dtype}",
            expected=f"{(T, problem.H)} {problem.dtype}",
            remedy=_remedy_of_shape(hidden, problem.H, problem.I),
        )
    if not hidden.device == routing.topk_ids.device == device:
        raise ContractError(
            "tensors are on another device than the prepared layer",
            got=f"hidden {hidden.device}, topk_ids {routing.topk_ids.device}",
            expected=f"both on {device}",
        )
    if T > problem.T or K != problem.K:
        raise ContractError(
            "the call is larger than the prepared problem",
            got=f"T={T}, K={K}",
            expected=f"T <= {problem.T}, K = {problem.K}",
            remedy="prepare for the largest T that will be used",
        )
    check_accumulate(out, accumulate)
    if out is not None:
        check_out(out, hidden, T, problem.H)


def check_accumulate(out: Tensor | None, accumulate: bool) -> None:
    """Adding needs an out to add to."""
    if accumulate is not True and accumulate is not False:
        raise ContractError("accumulate is no bool", got=shown(accumulate), expected="True or False")
    if accumulate and out is None:
        raise ContractError("accumulate=True needs something to add to", got="out=None", expected="out [T, H]")


def check_gate_and_up(gate: Tensor, up: Tensor) -> None:
    """gate and up must both be [rows, I], of one dtype, on one device."""
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device or gate.dim() != 2:
        raise ContractError(
            "gate and up do not fit together",
            got=f"{tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}",
            expected="both [rows, I], one dtype, one device",
        )
