"""The Ascend backend: torch_npu's operators on a 910B, bf16 and fp16. Never run on an NPU: see docs/ascend.md."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..backend import Numerics, Probe
from ..contract import Experts, Placement, Problem, Routing
from ..errors import BackendUnavailable
from ..packages import install
from . import groups, kernels, limits, machine, operators, path, run, steps
from .layout import weights_of
from .prepared import PreparedAscend

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..selfcheck.check import Check

MACHINE = "Ascend910B"


class AscendBackend:
    """See the module's docstring."""

    name = "ascend"
    device = "npu"

    @classmethod
    def probe(cls) -> Probe:
        if not operators.installed():
            return Probe(False, "torch_npu is not installed", f"on a machine with CANN: {install('ascend')}")
        if minor := operators.torch_it_is_for():
            return Probe(
                False,
                f"the installed torch_npu is for torch {minor}, and here is torch {torch.__version__}",
                f"pip install 'torch=={minor}.*', or torch_npu of torch's minor version",
            )
        try:
            npu = operators.load()
        except Exception as error:  # it loads CANN's libraries
            return Probe(False, f"torch_npu does not load: {error}", "install CANN and source its set_env.sh")
        if absent := operators.missing(npu):
            return Probe(False, f"this torch_npu has no {', '.join(absent)}", "install a newer torch_npu")
        if not npu.npu.is_available():
            return Probe(False, "no NPU is here", "use a machine with an Ascend 910B and its driver")
        names = tuple(npu.npu.get_device_name(i) for i in range(npu.npu.device_count()))
        if not any(name.startswith(MACHINE) for name in names):
            return Probe(False, f"the limits it checks are {MACHINE}'s, and here is {', '.join(names)}", devices=names)
        return Probe(True, devices=names)

    def npu(self) -> Any:
        """torch_npu; the tests put another in its place."""
        return operators.load()

    def why_not(self, problem: Problem) -> str | None:
        if problem.device != self.device:
            return (
                f"it runs on {self.device}, and the tensors are on {problem.device!r}; "
                f"to fix it: move them to {self.device!r}"
            )
        if problem.weight_format != "dense":
            return f"it runs dense weights, not {problem.weight_format!r}"
        if (reason := problem.beyond_silu()) is not None:
            return reason
        if problem.dtype not in (torch.bfloat16, torch.float16):
            return f"it runs bf16 and fp16, not {problem.dtype}"
        if (reason := path.why_not(self.npu, problem)) is not None:
            return reason
        E = problem.E // problem.D if problem.D > 1 else problem.E
        return _broken(problem.T, E, problem.K, problem.H, problem.I, problem.dtype)

    def numerics(self, problem: Problem) -> Numerics:
        gate_up = None if kernels.asked_for() else problem.dtype
        return Numerics(gate_up=gate_up, activation=problem.dtype, expert_out=problem.dtype)

    def why_no_group(self, group: ProcessGroup | None) -> str | None:
        """None if HCCL can name the group (default: all processes), else the reason, with the remedy."""
        try:
            self._hccl(group or dist.group.WORLD)
        except BackendUnavailable as error:
            return str(error).removesuffix(".")
        return None

    def group_name(self, group: ProcessGroup | None) -> str:
        """HCCL's name of the exchange's own group, of the processes of this group (default: all).

        Raises:
            BackendUnavailable: the group has no HCCL.
        """
        self._hccl(group or dist.group.WORLD)
        return self._hccl(groups.own_group(group)).get_hccl_comm_name(dist.get_rank())

    def _hccl(self, group: Any) -> Any:
        return groups.hccl(group, self.device)

    def machine(self) -> machine.Machine:
        """What this rank knows of its server, CANN and driver; the tests put another in its place."""
        return machine.here(self.npu())

    def versions(self) -> list[str]:
        """What `ttnn-moe selfcheck` shows beside the packages."""
        return machine.describe(self.machine())

    def selfchecks(self) -> list[Check]:
        """Each of torch_npu's operators alone, for `ttnn-moe selfcheck`."""
        from .selfchecks import checks

        return list(checks(self.npu(), self.device))

    def prepare(self, problem: Problem, experts: Experts, placement: Placement | None) -> PreparedAscend:
        return PreparedAscend(self.npu(), problem, experts, placement)

    def moe(self, hidden: Tensor, routing: Routing, experts: Experts, out: Tensor, accumulate: bool) -> None:
        path.moe(self.npu(), hidden, routing, path.weights(self.npu(), experts), out, accumulate)

    def moe_new(self, hidden: Tensor, routing: Routing, experts: Experts) -> Tensor:
        return path.result(self.npu(), hidden, routing, path.weights(self.npu(), experts), False)

    def gate_projection(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        return self._project(hidden, routing, experts, row_align, slice(None, experts.I))

    def up_projection(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        return self._project(hidden, routing, experts, row_align, slice(experts.I, None))

    def gate_up(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        both = self._project(hidden, routing, experts, row_align, slice(None))
        return self.npu().npu_swiglu(both, dim=-1) if both.numel() else both[:, : experts.I]

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return steps.silu_mul(self.npu(), gate, up)

    def down_projection(
        self, activations: Tensor, routing: Routing, experts: Experts, row_align: int, out: Tensor, accumulate: bool
    ) -> None:
        if routing.T:
            weight = weights_of(experts).down
            layout = routing.step_layout(row_align)
            steps.down_projection(self.npu(), activations, routing, layout, weight, out, accumulate)

    def _project(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int, columns: slice) -> Tensor:
        weight = weights_of(experts).gate_up
        # a slice of a transposed weight is neither of the two layouts that the operator documents
        part = weight if columns == slice(None) else weight[:, :, columns].contiguous()
        layout = routing.step_layout(row_align)
        if not layout.capacity:
            return hidden.new_empty(0, part.shape[2])
        return steps.project(self.npu(), hidden, layout, part)


@lru_cache(maxsize=4096)
def _broken(T: int, E: int, K: int, H: int, I: int, dtype: torch.dtype) -> str | None:
    """The first documented limit that a call of these sizes would break, or None."""
    for wide, distinct in product((False, True), repeat=2) if T else ():
        for operator, arguments in run.calls(T, E, K, H, I, dtype, wide, distinct):
            for row in limits.broken(operator, arguments):
                return limits.describe(row, arguments)
    return None
