"""The CUDA backend: CUDA C++ kernels where they serve, else Triton kernels; on sm_80 and newer.

Nothing waits for the GPU, everything is capturable.

With TRITON_INTERPRET=1 the same kernels run on the CPU, in fp16 and fp32, slowly: for tests and debugging.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..backend import Numerics, Probe
from ..contract import Experts, Placement, Problem, Routing
from . import launch
from .run import Buffers, on, plan_and_why, plan_for, run, step_plan, step_rows
from .tiles import is_few

if TYPE_CHECKING:
    from .prepared import PreparedCuda

MIN_CAPABILITY = (8, 0)


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


class CudaBackend:
    """See the module's docstring."""

    name = "cuda"

    @classmethod
    def probe(cls) -> Probe:
        if importlib.util.find_spec("triton") is None:
            return Probe(False, "triton is not installed", "pip install 'ttnn-moe[cuda]'")
        if interpreted():
            return Probe(True, devices=("cpu, through Triton's interpreter (TRITON_INTERPRET=1)",))
        if torch.version.cuda is None:
            return Probe(False, f"torch {torch.__version__} is built without CUDA", "install a CUDA build of torch")
        if not torch.cuda.is_available():
            return Probe(False, "no CUDA device is here", "use a machine with an NVIDIA GPU and its driver")
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        named = tuple(f"{p.name} (sm_{p.major}{p.minor})" for p in found)
        if all((p.major, p.minor) < MIN_CAPABILITY for p in found):
            return Probe(False, f"the kernels need sm_80 or newer, and here is {', '.join(named)}", devices=named)
        return Probe(True, devices=named)

    def why_not(self, problem: Problem) -> str | None:
        device = "cpu" if interpreted() else "cuda"
        if problem.device != device:
            where = "on the CPU under TRITON_INTERPRET=1" if interpreted() else "on CUDA devices"
            return f"it runs {where}, and the tensors are on {problem.device!r}; to fix it: move them to {device!r}"
        if problem.weight_format != "dense":
            return f"it runs dense weights, not {problem.weight_format!r}"
        if interpreted() and problem.dtype == torch.bfloat16:
            return "Triton's interpreter has no bf16 products; to fix it: use float16 or float32"
        if problem.E > 4096 or problem.K > 128:
            return f"it runs up to 4096 experts and K up to 128, not E={problem.E}, K={problem.K}"
        return None

    def kernels(self, problem: Problem) -> str:
        device = torch.device("cpu") if interpreted() else torch.device("cuda", torch.cuda.current_device())
        sizes = (problem.T, problem.E, problem.K, problem.H, problem.I)
        return plan_and_why(*sizes, problem.dtype.itemsize, device)[1]

    def numerics(self, problem: Problem) -> Numerics:
        if problem.dtype == torch.float32:
            return Numerics()
        few = is_few(problem.T, problem.E, problem.K)
        return Numerics(activation=problem.dtype, expert_out=None if few else problem.dtype)

    def prepare(self, problem: Problem, experts: Experts, placement: Placement | None) -> PreparedCuda:
        from .prepared import PreparedCuda

        return PreparedCuda(problem, experts, placement)

    def moe(self, hidden: Tensor, routing: Routing, experts: Experts, out: Tensor, accumulate: bool) -> None:
        if routing.T:
            selection = launch.Selection.of(routing)
            plan = plan_for(routing.T, routing.E, routing.K, experts, hidden, out)
            run(hidden, selection, experts, out, accumulate, plan, Buffers.of(plan, routing.T * routing.K, experts))

    def gate_projection(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        return self._step(hidden, routing, experts, row_align, "gate")

    def up_projection(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        return self._step(hidden, routing, experts, row_align, "up")

    def gate_up(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        return self._step(hidden, routing, experts, row_align, "both")

    def _step(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int, which: str) -> Tensor:
        out = hidden.new_empty(routing.step_layout(row_align).capacity, experts.I)
        if len(out):
            plan = step_plan(routing, experts)
            rows = step_rows(routing, row_align, plan.m)
            with on(hidden.device):
                if which == "both":
                    launch.gate_up(hidden, experts, rows, out, plan.m, plan.gate_up)
                else:
                    launch.project(hidden, experts, which, rows, out, plan.m, plan.gate_up)
        return out

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        with on(gate.device):
            launch.silu_mul(gate.contiguous(), up.contiguous(), out)
        return out

    def down_projection(
        self, activations: Tensor, routing: Routing, experts: Experts, row_align: int, out: Tensor, accumulate: bool
    ) -> None:
        if not routing.T:
            return
        plan = step_plan(routing, experts)
        rows = step_rows(routing, row_align, plan.m)
        expert_out = activations.new_empty(len(activations), experts.H)
        weights = routing.step_layout(row_align).weights
        with on(activations.device):
            launch.down(activations, experts, rows, expert_out, plan.m, plan.down)
            launch.combine(expert_out, rows.inverse, weights, routing.num_tokens, out, accumulate, plan.combine_h)
