"""The programs of one layer's steps on one device or mesh, and the buffers between them, made when first needed.

A program is planned for a bound on T, a power of two from 32 on. It serves every call of up to that many tokens, and
every routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ContractError
from ..sizes import ceil_div, power_of_2
from . import tensors
from .all_reduce import partial_dtype, partial_rows
from .device import Device
from .launch import Launcher
from .layer_sizes import Sizes, plan, plan_layer, planned
from .runtime import library
from .too_large import LEAST_T, too_large

if TYPE_CHECKING:
    from .._planner import Program

MAX_T = 4096
Form = tuple[tuple[int, ...], str, str]


@dataclass(frozen=True)
class Routed:
    """The routing of one call on the device, as kernels read it. No one checks it: steps.py checks a caller's.

    Attributes:
        T: tokens. bound: the T that its buffers are made for. tensors: ttnn tensors by name.
    """

    T: int
    bound: int
    tensors: dict[str, Any]

    def pick(self, *names: str) -> dict[str, Any]:
        """Some of the tensors, by name."""
        return {name: self.tensors[name] for name in names}


class LayerPrograms:
    """See the module's docstring. Get it with `programs_of`.

    Tensors have to be right: layer.py and steps.py check those of a caller.

    Attributes:
        max_T: tokens of a call, at most.
    """

    def __init__(self, device: Device, sizes: Sizes):
        self.device, self.sizes = device, sizes
        self._plans: dict[tuple[Any, ...], Launcher] = {}
        self._buffers: dict[tuple[Any, ...], Any] = {}
        self._routed: dict[int, dict[str, Any]] = {}
        self.max_T = self._largest_bound()

    def bound(self, T: int) -> int:
        """The T that a call of T tokens uses the programs of.

        Raises:
            ContractError: more tokens than one program takes.
        """
        if T > self.max_T:
            raise ContractError(
                "T is beyond what one program takes",
                got=T,
                expected=f"T <= {self.max_T}",
                remedy="call it for parts of the tokens",
            )
        return max(LEAST_T, power_of_2(T))

    def route(
        self, topk_ids: Any, topk_weights: Any, mapping: Any, T: int, into: dict[str, Any] | None = None
    ) -> Routed:
        """topk_ids [>= T, K] int32, topk_weights [>= T, K] fp32 -> the kernels' view. Rows past T are ignored.

        Args:
            into: tensors of `routing_forms` to write to; None: buffers that the next call overwrites.
        """
        bound = self.bound(T)
        made = self._routed.get(bound) if into is None else into
        if made is None:
            forms = self.routing_forms(bound)
            made = self._routed[bound] = {name: self._buffer(name, form, bound) for name, form in forms.items()}
        given = {"topk_ids": topk_ids, "topk_weights": topk_weights, "device_expert_mapping": mapping, **made}
        self._launcher("routing", bound)(given, {"T": T})
        return Routed(T, bound, {"device_expert_mapping": mapping, **made})

    def gate_up(self, hidden: Any, routed: Routed, gate: Any, up: Any, out: Any = None) -> Any:
        """Steps 1 to 3: activations [rows, I], in out, else in a buffer that the next call overwrites."""
        out = self._rows("activations", routed.bound) if out is None else out
        given = {**self._routing(routed), "hidden": hidden, "weight_0": gate, "weight_1": up, "out": out}
        self._launcher("gate_up", routed.bound)(given, {})
        return out

    def project(self, hidden: Any, routed: Routed, weight: Any, name: str, out: Any = None) -> Any:
        """Step 1 or 2: [rows, I], in out, else in a buffer that the next call of that name overwrites."""
        out = self._rows(name, routed.bound) if out is None else out
        given = {**self._routing(routed), "hidden": hidden, "weight_0": weight, "out": out}
        self._launcher("project", routed.bound)(given, {})
        return out

    def silu_mul(self, gate: Any, up: Any, bound: int, out: Any = None) -> Any:
        """Step 3 over all rows of the two buffers, in out, else in a buffer that the next call overwrites."""
        out = self._rows("product", bound) if out is None else out
        self._launcher("silu_mul", bound)({"gate": gate, "up": up, "out": out}, {})
        return out

    def down(self, activations: Any, routed: Routed, weight: Any, out: Any, accumulate: bool) -> None:
        """Step 4: write the result to out [T, H], or add it."""
        ttnn = library()

        given = {**self._routing(routed), **routed.pick("routed_token_weights"), "activations": activations}
        given |= {"weight_0": weight, "out": out}
        kind = "float32" if out.dtype == ttnn.float32 else "bfloat16"
        scalars = {"token_tiles": ceil_div(routed.T, 32), "accumulate": int(accumulate)}
        self._launcher("down", routed.bound, kind)(given, scalars)

    def partial(self, T: int) -> Any:
        """One device's part of the sum of T tokens, [rows, H]; a decode step's is kept, and overwritten."""
        rows, dtype = partial_rows(T, self.sizes.H, self.device), partial_dtype(self.device)
        form: Form = ((rows, self.sizes.H), dtype, "TILE")
        return self._buffer("partial", form, 32) if T <= 32 else tensors.empty(*form, self.device)

    def rows(self, bound: int) -> int:
        """Rows of a step tensor."""
        return max(planned(self.sizes, bound).max_blocks, 1) * 32

    def _routing(self, routed: Routed) -> dict[str, Any]:
        return routed.pick("num_routed_tokens", "device_expert_mapping", "routed_tokens")

    def routing_forms(self, bound: int) -> dict[str, Form]:
        """Shape, dtype and layout of the routing of up to `bound` tokens."""
        E = self.sizes.E
        return {
            "num_routed_tokens": ((1, E), "int32", "ROW_MAJOR"),
            "routed_tokens": ((E, bound), "int32", "ROW_MAJOR"),
            "routed_token_weights": ((E, bound), "bfloat16", "ROW_MAJOR"),
        }

    def rows_form(self, bound: int) -> Form:
        """Shape, dtype and layout of a step tensor: gate, up or activations."""
        return (self.rows(bound), self.sizes.I), "bfloat16", "TILE"

    def buffers(self, bound: int) -> dict[str, Form]:
        """Shape, dtype and layout of the buffers that calls of up to `bound` tokens share."""
        return {**self.routing_forms(bound), "activations": self.rows_form(bound)}

    def _rows(self, name: str, bound: int) -> Any:
        made = self._buffers.get((name, bound))
        return self._buffer(name, self.rows_form(bound), bound) if made is None else made

    def _buffer(self, name: str, form: Form, bound: int) -> Any:
        key = (name, bound)
        if key not in self._buffers:
            self._buffers[key] = tensors.empty(*form, self.device)
        return self._buffers[key]

    def _launcher(self, name: str, bound: int, out_format: str = "bfloat16") -> Launcher:
        key = (name, bound, out_format)
        if key not in self._plans:
            self._plans[key] = Launcher(self.plan(name, bound, out_format), self.device.handle)
        return self._plans[key]

    def plan(self, name: str, bound: int, out_format: str = "bfloat16") -> Program:
        """The program of a step: routing, gate_up, project, silu_mul or down.

        Raises:
            ValueError: the planner has none; its reason.
        """
        return plan(self.sizes, self.device.machine, name, bound, out_format)

    def _largest_bound(self) -> int:
        """The largest bound up to MAX_T whose sums fit the cores' L1.

        Raises:
            ContractError: the planner has no program for these sizes at any T; what would make one. Or K is below 1.
        """
        if self.sizes.K < 1:
            raise ContractError("a token has no experts", got=f"K={self.sizes.K}", expected="K >= 1")
        bound = MAX_T
        while True:
            try:
                plan_layer(self.sizes, self.device.machine, bound)
                return bound
            except ValueError as error:
                if bound == LEAST_T:
                    raise too_large(self.device, self.sizes, str(error)) from None
                bound //= 2


def programs_of(device: Device, sizes: Sizes) -> LayerPrograms:
    """The programs of these sizes; a device has one set of them.

    Raises:
        ContractError: the experts are too large for the cores' L1; what would make them fit.
    """
    if sizes not in device.cache:
        device.cache[sizes] = LayerPrograms(device, sizes)
    return device.cache[sizes]
