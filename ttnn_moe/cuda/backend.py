"""The CUDA backend, for sm_80 and newer: the first family of kernels that can run a call runs it.

No call waits for the GPU, and a CUDA graph can capture every call.

With TRITON_INTERPRET=1 the Triton kernels run on the CPU, slowly, in fp16 and fp32. Use it for testing only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..accelerator import on
from ..backend import Numerics, Probe
from ..contract import Experts, Placement, Problem, Routing
from ..packages import install
from .arch import target_of
from .device import gpus, interpreted
from .moe import triton_launch
from .moe.families import choose
from .moe.family import Call, numerics_of
from .moe.prepared import PreparedCuda
from .moe.run import run
from .moe.steps import step_rows, step_tiles
from .moe.warmup import compile_up_to

if TYPE_CHECKING:
    from ..selfcheck.check import Outcome

MIN_CAPABILITY = (8, 0)


class CudaBackend:
    """See the module's docstring.

    A Problem names no GPU: why_not, kernels and numerics answer for the current one. A call, a prepared layer and
    compile_ahead choose kernels for the GPU of their tensors. Where GPUs differ, ask under torch.cuda.device.
    """

    name = "cuda"

    @classmethod
    def probe(cls) -> Probe:
        if importlib.util.find_spec("triton") is None:
            return Probe(False, "triton is not installed", install("cuda"))
        if interpreted():
            return Probe(True, devices=("cpu, through Triton's interpreter (TRITON_INTERPRET=1)",))
        if torch.version.cuda is None:
            return Probe(False, f"torch {torch.__version__} is built without CUDA", "install a CUDA build of torch")
        if not torch.cuda.is_available():
            return Probe(False, "no CUDA device is here", "use a machine with an NVIDIA GPU and its driver")
        found = gpus()
        named = tuple(f"{here.name} ({here.sm})" for here in found)
        if all(here.capability < MIN_CAPABILITY for here in found):
            return Probe(False, f"the kernels need sm_80 or newer, and here is {', '.join(named)}", devices=named)
        return Probe(True, devices=named)

    def why_not(self, problem: Problem) -> str | None:
        device = "cpu" if interpreted() else "cuda"
        if problem.device != device:
            where = "on the CPU under TRITON_INTERPRET=1" if interpreted() else "on CUDA devices"
            return f"it runs {where}, and the tensors are on {problem.device!r}; to fix it: move them to {device!r}"
        if interpreted() and problem.dtype == torch.bfloat16:
            return "Triton's interpreter has no bf16 products; to fix it: use float16 or float32"
        chosen = choose(problem, target_of())
        return chosen if isinstance(chosen, str) else None

    def kernels(self, problem: Problem) -> str:
        return str(choose(problem, target_of()))

    def numerics(self, problem: Problem) -> Numerics:
        if problem.dtype == torch.float32:
            return Numerics()
        chosen = choose(problem, target_of())
        if isinstance(chosen, str):
            return Numerics(activation=problem.dtype, expert_out=problem.dtype)
        return numerics_of(chosen.family, problem)

    def prepare(self, problem: Problem, experts: Experts, placement: Placement | None) -> PreparedCuda:
        return PreparedCuda(problem, experts, placement)

    def prepare_in_turn(
        self, problem: Problem, experts: Experts, placement: Placement | None, owner: Hashable = True
    ) -> PreparedCuda:
        return PreparedCuda(problem, experts, placement, in_turn=owner)

    def compile_ahead(self, problem: Problem, device: torch.device) -> None:
        compile_up_to(problem, target_of(device))

    def moe(self, hidden: Tensor, routing: Routing, experts: Experts, out: Tensor, accumulate: bool) -> None:
        if routing.T:
            run(Call(hidden, routing, experts, out, accumulate))

    def format_checks(self, weight_format: str) -> Iterable[Outcome | str]:
        if interpreted():
            return ()
        from .moe import tile_checks

        return tile_checks.checks(weight_format)

    def gate_projection(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        return self._step(hidden, routing, experts, row_align, "gate")

    def up_projection(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        return self._step(hidden, routing, experts, row_align, "up")

    def gate_up(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        return self._step(hidden, routing, experts, row_align, "both")

    def _step(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int, which: str) -> Tensor:
        out = hidden.new_empty(routing.step_layout(row_align).capacity, experts.I)
        if len(out):
            tiles = step_tiles(routing, experts)
            rows = step_rows(routing, row_align, tiles.m)
            with on(hidden.device):
                if which == "both":
                    triton_launch.gate_up(hidden, experts, rows, out, tiles.m, tiles.gate_up)
                else:
                    triton_launch.project(hidden, experts, which, rows, out, tiles.m, tiles.gate_up)
        return out

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        with on(gate.device):
            triton_launch.silu_mul(gate.contiguous(), up.contiguous(), out)
        return out

    def down_projection(
        self, activations: Tensor, routing: Routing, experts: Experts, row_align: int, out: Tensor, accumulate: bool
    ) -> None:
        if not routing.T:
            return
        tiles = step_tiles(routing, experts)
        rows = step_rows(routing, row_align, tiles.m)
        expert_out = activations.new_empty(len(activations), experts.H)
        weights = routing.step_layout(row_align).weights
        with on(activations.device):
            triton_launch.down(activations, experts, rows, expert_out, tiles.m, tiles.down)
            triton_launch.combine(
                expert_out, rows.inverse, weights, routing.num_tokens, out, accumulate, tiles.combine_h
            )
