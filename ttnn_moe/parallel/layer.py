"""One layer whose experts are spread over processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .. import api, registry
from ..accelerator import on
from ..arguments import seconds
from ..backend import ChecksPromises, CompilesAhead, Prepared, store
from ..contract import Experts, Placement, Problem, Routing, check_kind, or_float32
from ..errors import ContractError, TtnnMoeError
from ..ids import is_distinct
from ..placement import check_placement
from ..visible import shown
from . import exchanges
from .exchanges import AllGather, AllToAll, Topology, agreement
from .exchanges.exchange import calls_of, captures
from .exchanges.hierarchical import Hierarchical
from .exchanges.peer_memory import PeerMemoryExchange
from .hierarchical import Nodes, PeerStopped

REMEDY = "mend what that rank reports, then start all ranks again"
NAMES = (exchanges.AUTO, *(kind.name for kind in exchanges.EXCHANGES))


class ExpertParallel(Prepared):
    """op(hidden [T, H], topk_ids [T, K], topk_weights [T, K]) -> out [T, H], the sum over all processes' experts.

    Every process of the group makes one, with its own experts, and all call it together, also those with no token.
    out, accumulate and num_tokens (each process has its own) are those of any prepared layer.

    Args:
        problem: as for ttnn_moe.prepare, and equal on every process, but for out_dtype; T bounds the tokens of each, E
            counts all experts.
        experts: the E/D of this process, in the order of placement.device_expert_mapping[rank].
        placement: with rank set; D is the size of the group.
        group: of torch.distributed; default: all processes. dispatch_combine makes one more of the same processes,
            which all its layers share, as nothing else may use it.
        backend: runs the local experts.
        exchange: "dispatch_combine" (torch_npu's npu_moe_distribute_*_v2), "all_gather", "all_to_all", or "auto". On
            NPUs auto takes the first of them that can, dispatch_combine from 16 ranks on; elsewhere all_to_all.
            Should that fail at its first call, auto warns and takes the next. "hierarchical": see
            exchanges.hierarchical.
        ids: what the caller promises of topk_ids in every call, as for ttnn_moe.moe.
        wire: dtype in which results travel: fp32, or the dtype of hidden (all_gather and all_to_all: one rounding a
            process; hierarchical: one a hop, bf16). dispatch_combine has no choice.
        nodes: of "hierarchical", R_inter x R_intra ranks; default: as few nodes as D allows.
        timeout: of "hierarchical", seconds without progress after which all ranks raise PeerStopped; above 0.

    Where a call fails within a process, its error passes, and no later call sends a token: each raises RankStopped or
    PeerStopped, on all processes. See docs/expert_parallel.md, "A rank that fails and goes on".

    Attributes:
        kernels: the exchange, if kernels of the GPU make it. Then a call waits for nothing, and `kernels.check` says
            what went wrong in calls that are over.

    Raises:
        ContractError: torch.distributed is not started; experts, placement, group and problem do not fit; or another
            process gives another problem, placement, exchange, wire, nodes or timeout.
        BackendUnavailable: the exchange or the backend that was asked for cannot run, and why.
    """

    def __init__(
        self,
        problem: Problem,
        experts: Experts,
        placement: Placement,
        group: dist.ProcessGroup | None = None,
        backend: str = "auto",
        exchange: str = "auto",
        wire: torch.dtype = torch.float32,
        ids: str = "any",
        nodes: Nodes | None = None,
        timeout: float = 30.0,
    ):
        _check_group(group)
        # from here on the other processes wait for this one, also where its arguments are refused
        with agreement.all_or_none(group, "a rank cannot make its part of a layer", REMEDY, own=(TtnnMoeError,)):
            check_kind(problem, Problem)
            check_kind(experts, Experts)
            if exchange not in NAMES:
                raise ContractError("unknown exchange", got=repr(exchange), expected=f"one of {list(NAMES)}")
            if wire not in (torch.float32, problem.dtype):
                raise ContractError("unsupported wire dtype", got=wire, expected=or_float32(problem.dtype))
            timeout = seconds("timeout", timeout)
            if nodes is not None and not isinstance(nodes, Nodes):
                raise ContractError(
                    "nodes is no Nodes", got=shown(nodes), expected="a parallel.hierarchical.Nodes, or None"
                )
            if nodes is not None and exchange != Hierarchical.name:
                raise ContractError(
                    "only the exchange hierarchical has nodes",
                    got=f"exchange={exchange!r}, nodes={nodes}",
                    expected="nodes=None",
                    remedy="leave nodes out, or exchange='hierarchical'",
                )
            check_placement(placement)
            _check_ranks(placement, group)
            super().__init__(api.described(problem, experts, placement), experts, placement)
            self.distinct = is_distinct(ids)
            self._local = Problem.of(placement.D * problem.T, problem.K, experts, problem.dtype, wire)
            self._experts, self._calls, self._rank = experts, calls_of(group), placement.rank or 0
            local = Problem.of(1, problem.K, experts, problem.dtype)
            runs = registry.choose(local, backend)
            self._runs = runs
            # an exchange gives the backend ids that promise nothing
            self._check_promise = runs.check_promise if isinstance(runs, ChecksPromises) else None
        topology = Topology(placement, runs, group, wire, nodes, timeout)
        with on(self.device):  # the caller's current one may be another, whose memory peers would get
            self.exchange = exchanges.choose(exchange, self.problem, topology)
            made = self.exchange.transport if isinstance(self.exchange, Hierarchical) else None
            self.kernels = made if isinstance(made, PeerMemoryExchange) else None
            if self.kernels is not None:
                self.kernels.ready(experts)

    def compile(self, least: int = 1, *, ids64: bool = False, accumulate: bool = False) -> int:
        """Compile what this process's experts launch for the tokens of all processes; see Prepared. Returns 0."""
        if isinstance(self._runs, CompilesAhead):
            self._runs.compile_ahead(self._local, self.device)
        return 0

    def renew(self, experts: Experts) -> None:
        """This process's experts lie where they lay, but need other kernels. No other process takes part.

        Where this fails, the next call raises RankStopped, on all processes: the weights changed.

        Raises:
            ContractError: other experts. BackendUnavailable: nothing runs them. torch.OutOfMemoryError.
        """
        held = [tensor.data_ptr() for tensor in self._experts.tensors.values()]
        if [tensor.data_ptr() for tensor in experts.tensors.values()] != held or experts.sizes != self._experts.sizes:
            raise ContractError("other experts", got=experts, expected=f"the tensors of {self._experts}")
        try:
            if self.kernels is not None:
                with on(self.device):
                    self.kernels.renew(experts)
            self._experts = experts
        except BaseException as error:
            self._fail_between(error)
            raise

    def _failed(self, error: BaseException) -> None:
        # a call that was refused before _run; where _run failed, it said so itself, and its transport remembers
        # PeerStopped. One rank alone is apart from nobody
        if self.problem.D > 1 and not isinstance(error, PeerStopped) and self._sends and self._calls.failure is None:
            self._fail_between(error)
            self._calls.waits = self._messages
            if isinstance(error, Exception):
                self._calls.say(error)

    def _fail_between(self, error: BaseException) -> None:
        """This error ends later calls of this rank. No message is under way, so the next call can tell all ranks."""
        if self._calls.failure is None:
            self._calls.tells = True
            self._calls.fail(error, self._rank)

    @property
    def _messages(self) -> object:
        """What the messages of a call look like to ranks that wait for them; None: they meet no other layer's."""
        sizes, name = self._local, self.exchange.name
        if name == AllToAll.name:  # the first are numbers of tokens, which end the call
            return name
        return (name, sizes.T, sizes.K, sizes.H, sizes.dtype, sizes.out_dtype) if name == AllGather.name else None

    @property
    def _meets_others(self) -> bool:
        """Whether the other ranks may wait for messages of other sizes. Gloo would end their processes."""
        waits, mine = self._calls.waits, self._messages
        return None not in (waits, mine) and waits != mine

    @property
    def _sends(self) -> bool:
        """Whether a call now sends anything."""
        return self.kernels.sends if self.kernels is not None else not captures(self.device)

    def _run(self, hidden: Tensor, routing: Routing, out: Tensor, accumulate: bool) -> None:
        with on(self.device):
            self._run_here(hidden, routing, out, accumulate)

    def _run_here(self, hidden: Tensor, routing: Routing, out: Tensor, accumulate: bool) -> None:
        if self._check_promise is not None:
            self._check_promise(routing)
        calls, kernels = self._calls, self.kernels
        if not calls.turn.acquire(blocking=False):
            raise ContractError(
                "two threads call one process group at once, and processes must agree on the order of calls",
                remedy="let one thread of each process make the calls",
            )
        try:
            if kernels is not None or not calls.tells or self._meets_others:
                calls.check()
            if kernels is not None:
                kernels.check()
            if kernels is not None and out.dtype == hidden.dtype and out.is_contiguous() and out.data_ptr() % 16 == 0:
                kernels.into(hidden, routing, out, accumulate)
            else:
                store(self.exchange(hidden, routing, self._experts), out, accumulate, routing.num_tokens)
            if kernels is not None:
                kernels.look_at_times()
        except PeerStopped:  # the transport remembers it
            raise
        except BaseException as error:
            if self.problem.D > 1 and self._sends:
                calls.fail(error, self._rank)
            raise
        finally:
            calls.turn.release()


def _check_group(group: dist.ProcessGroup | None) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise ContractError(
            "there is no process group: torch.distributed is not started",
            remedy="torch.distributed.init_process_group('hccl'), or 'nccl', or 'gloo', in every process",
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ContractError(
            "group is no process group of this process",
            got=shown(group),
            expected="a torch.distributed.ProcessGroup that this process is in, or None",
        )


def _check_ranks(placement: Placement, group: dist.ProcessGroup | None) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if placement.D != size or placement.rank != rank:
        raise ContractError(
            "the placement is not that of this process group",
            got=f"D={placement.D}, rank={placement.rank}",
            expected=f"D={size}, rank={rank}",
        )
