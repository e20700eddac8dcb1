"""What a backend is: a probe, a capability gate, declared roundings, the operator and its steps."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from .contract import Experts, Placement, Problem, Routing, check_memory, check_prepared, check_rows_and_out
from .errors import ContractError
from .memory import check_tensors, dense, note_write
from .selfcheck.check import Check, Outcome
from .watched import AUTOGRAD, watcher

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

R = TypeVar("R")


def run(work: Callable[..., R], *args: Any) -> R:
    """work(*args) outside autocast: a backend, or a model, computes in the dtypes that it declares."""
    if torch._C._is_any_autocast_enabled():
        with torch._C._DisableAutocast():
            return work(*args)
    return work(*args)


@dataclass(frozen=True)
class Probe:
    """Whether a backend can run on this machine; if not, why, and what would make it."""

    available: bool
    reason: str = ""
    remedy: str = ""
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Numerics:
    """Where a path rounds, beside its fp32 accumulators and the one rounding to out. None = not rounded there.

    Attributes:
        gate_up: dtype of the gate and up projections before SiLU.
        silu: dtype of silu(gate) before the product with up.
        activation: dtype of silu(gate) * up before the down projection.
        expert_out: dtype of each expert's output before the routing weight.
        weighted: dtype of an expert's output times its routing weight.
        routing_weight: dtype of the routing weights.
        operands: format of hidden and of the activation in both products: "mxfp8" by the rule "up", "mxfp4" by "ocp".
    """

    gate_up: torch.dtype | None = None
    silu: torch.dtype | None = None
    activation: torch.dtype | None = None
    expert_out: torch.dtype | None = None
    weighted: torch.dtype | None = None
    routing_weight: torch.dtype | None = None
    operands: str | None = None


class Prepared(ABC):
    """One layer made ready by `prepare`: it owns workspace and compiled kernels; calls allocate the output only.

    A subclass makes its workspace in __init__, under `torch.inference_mode(False)`, and lets `_run` be called from any
    thread.

    Attributes:
        problem: sizes of the largest call. placement: what the routing of a call knows of where experts live.
        device: where the experts are, and the tensors of a call must be.
        distinct: the ids of all calls are promised to be distinct, as for `ttnn_moe.moe`; set once, when made.
    """

    distinct = False

    def __init__(self, problem: Problem, experts: Experts, placement: Placement | None = None):
        self.problem, self.placement, self.device = problem, placement, experts.device
        # weak: a backend with weights of its own lets go of these
        self._weights = tuple(map(weakref.ref, experts.tensors.values()))

    def __call__(
        self,
        hidden: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
        num_tokens: Tensor | None = None,
    ) -> Tensor:
        """hidden [T, H], topk_ids and topk_weights [T, K] with T <= problem.T -> out [T, H].

        Args:
            hidden: in problem.dtype. topk_ids: int32 or int64. topk_weights: fp32, bf16 or fp16.
            out: contiguous, in problem.dtype or fp32, to write to; default: a new one in problem.out_dtype.
            accumulate: add to out.
            num_tokens: int32 [] or [1], read on the device; rows of out past it are not written.

        Raises:
            ContractError: arguments that do not fit; or autograd, a tracer or a transform would record the call.
        """
        if torch.compiler.is_dynamo_compiling():
            return _call_outside_graph(self, hidden, topk_ids, topk_weights, out, accumulate, num_tokens)
        try:
            check_rows_and_out(hidden, out)
            if type(topk_weights) is not Tensor:
                check_tensors(topk_weights=topk_weights)
            found = watcher((hidden, topk_weights, out, *self._held())) if torch.is_grad_enabled() else watcher(())
            if found is not None:
                raise ContractError(
                    "a prepared layer is for inference, and something would record this call",
                    got=found,
                    expected="a plain call",
                    remedy="call it under torch.no_grad(), or call ttnn_moe.moe"
                    if found == AUTOGRAD
                    else "call it outside of that; with vmap, put the batch into T",
                )
            problem = self.problem
            routing = Routing.from_topk(
                topk_ids,
                topk_weights,
                problem.E,
                placement=self.placement,
                num_tokens=num_tokens,
                distinct=self.distinct,
            )
            check_prepared(problem, self.device, hidden, routing, out, accumulate)
            hidden = dense(hidden)
            if out is None:
                return run(self._new, hidden, routing)
            check_memory(out, routing, hidden, *self._held())
            note_write(out)
            run(self._run, hidden, routing, out, accumulate)
            return out
        except BaseException as error:
            self._failed(error)
            raise

    def compile(self, least: int = 1, *, ids64: bool = False, accumulate: bool = False) -> int:
        """Compile, several at a time, what calls of least to problem.T tokens launch; returns how many were compiled.

        A call compiles what it lacks by itself, one kernel after the other. Triton kernels compile at their first
        launch.

        Args:
            ids64: calls come with int64 ids, else int32. accumulate: calls add to out.
        """
        return 0

    def _failed(self, error: BaseException) -> None:  # noqa: B027
        """This error ended a call, which perhaps never came to `_run`."""

    def _held(self) -> list[Tensor]:
        """The weights that `prepare` got, as far as they live."""
        return [tensor for ref in self._weights if (tensor := ref()) is not None]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.problem})"

    @abstractmethod
    def _run(self, hidden: Tensor, routing: Routing, out: Tensor, accumulate: bool) -> None:
        """Write, or add, the result to out [T, H]; arguments were checked, hidden is contiguous."""

    def _new(self, hidden: Tensor, routing: Routing) -> Tensor:
        """The result [T, H] in a new tensor; a backend whose operators allocate their result returns that one."""
        out = hidden.new_empty(routing.T, self.problem.H, dtype=self.problem.out_dtype)
        self._run(hidden, routing, out, False)
        return out


@torch._disable_dynamo
def _call_outside_graph(
    layer: Prepared,
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    out: Tensor | None,
    accumulate: bool,
    num_tokens: Tensor | None,
) -> Tensor:
    """torch.compile breaks its graph here: a prepared layer launches kernels that it cannot see."""
    return layer(hidden, topk_ids, topk_weights, out=out, accumulate=accumulate, num_tokens=num_tokens)


def store(total: Tensor, out: Tensor, accumulate: bool, num_tokens: Tensor | None) -> None:
    """Write a result [T, H] to out, or add it in fp32; rows from num_tokens on are left as they are."""
    if accumulate:
        total = total.float() + out
    if num_tokens is not None:
        true = torch.arange(len(out), device=out.device) < num_tokens
        total = torch.where(true[:, None], total.to(out.dtype), out)
    out.copy_(total)


@runtime_checkable
class Backend(Protocol):
    """One machine's way to run the operator. Arguments are checked before they get here."""

    name: str

    @classmethod
    def probe(cls) -> Probe:
        """Look at this machine, cheaply, and never raise."""

    def why_not(self, problem: Problem) -> str | None:
        """None if this backend can run the problem, else the reason, with the remedy."""

    def numerics(self, problem: Problem) -> Numerics:
        """Where the fused path rounds."""

    def prepare(self, problem: Problem, experts: Experts, placement: Placement | None) -> Prepared:
        """Allocate and compile all that calls of up to problem.T tokens need."""

    def moe(self, hidden: Tensor, routing: Routing, experts: Experts, out: Tensor, accumulate: bool) -> None:
        """Write (or add) the whole operator's result to out [T, H]."""

    def gate_projection(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        """Step 1: [capacity, I] in the dtype of hidden."""

    def up_projection(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        """Step 2: [capacity, I] in the dtype of hidden."""

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Step 3: silu(gate) * up, rounded once."""

    def gate_up(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        """Steps 1 to 3 in one: activations [capacity, I]."""

    def down_projection(
        self, activations: Tensor, routing: Routing, experts: Experts, row_align: int, out: Tensor, accumulate: bool
    ) -> None:
        """Step 4: activations [capacity, I] through the down weights, weighted, written or added to out [T, H]."""


# What a backend may offer beside: ask with isinstance.


@runtime_checkable
class AllocatesResult(Protocol):
    """A backend whose operators allocate their result: without out, no copy is made."""

    def moe_new(self, hidden: Tensor, routing: Routing, experts: Experts) -> Tensor:
        """As `Backend.moe`, in a new tensor in the dtype of hidden."""


@runtime_checkable
class Explains(Protocol):
    """A backend that has several sets of kernels for the whole operator."""

    def kernels(self, problem: Problem) -> str:
        """Which of them run a problem that the backend can run, and why no others do."""


@runtime_checkable
class AlignsRows(Protocol):
    """A backend whose step tensors start every expert at a multiple of row_align; others take 1."""

    row_align: int


@runtime_checkable
class NamesVersions(Protocol):
    """A backend that runs on more than the packages that `doctor` lists."""

    def versions(self) -> list[str]:
        """A line for each part: drivers, toolkits."""


@runtime_checkable
class SharesScratch(Protocol):
    """A backend with scratch for each stream, which can do with one."""

    def prepare_in_turn(
        self, problem: Problem, experts: Experts, placement: Placement | None, owner: Hashable = True
    ) -> Prepared:
        """As prepare, for an owner whose calls follow one another, whatever their streams.

        Layers of one problem and one owner share one scratch.
        """


@runtime_checkable
class CompilesAhead(Protocol):
    """A backend that can compile before a layer is prepared, as while its weights are read."""

    def compile_ahead(self, problem: Problem, device: torch.device) -> None:
        """Compile what calls of up to problem.T tokens launch; from any thread."""


@runtime_checkable
class ChecksPromises(Protocol):
    """A backend that can check what a caller promises of ids: an exchange gives it other ids than the caller's."""

    def check_promise(self, routing: Routing) -> None:
        """Raise ContractError, where its user asks for it, for the first t and k that break the promise."""


@runtime_checkable
class ChecksItself(Protocol):
    """A backend that brings checks of its own, such as of a vendor's operators."""

    def selfchecks(self) -> Sequence[Check]:
        """They run before the contract's, on the device that the backend takes tensors on."""


@runtime_checkable
class ChecksFormats(Protocol):
    """A backend that brings checks of its own for a weight format, such as of each tile of its kernels."""

    def format_checks(self, weight_format: str) -> Iterable[Outcome | str]:
        """What each gave, as it ends, before the contract's; lines about this machine, such as the fastest tile."""


@runtime_checkable
class RunsOnNpu(Protocol):
    """A backend of torch_npu: what an exchange by its operators needs."""

    def npu(self) -> Any:
        """The torch_npu module."""

    def machine(self) -> Any:
        """What this rank knows of its server, CANN and driver: an ascend.machine.Machine."""

    def why_no_group(self, group: ProcessGroup | None) -> str | None:
        """None if HCCL can name the group (default: all processes), else the reason, with the remedy."""

    def group_name(self, group: ProcessGroup | None) -> str:
        """HCCL's name of a group that only the exchange uses, of the processes of this group (default: all).

        Raises:
            BackendUnavailable: the group has no HCCL.
        """
