"""Ranks of one group on the GPUs of this process: several a GPU (virtual ranks), or one each."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import pytest
import torch

from delivered import delivered
from ttnn_moe.contract import Placement
from ttnn_moe.cuda.combine import peers
from ttnn_moe.cuda.combine.kernel import RankKernel, RingPlan
from ttnn_moe.cuda.combine.node import NodeCombine, NodeCombinePlan, NodeDispatch, NodeDispatchPlan, origins_at, rows_at
from ttnn_moe.cuda.combine.rank_combine import Plan, RankCombine, Stopped, pointers, stopped
from ttnn_moe.cuda.combine.rank_dispatch import DispatchPlan, RankDispatch, Received
from ttnn_moe.parallel.hierarchical import Nodes, tree_sum
from ttnn_moe.parallel.hierarchical.nodes import rank_masks
from ttnn_moe.parallel.hierarchical.rings import Role

FACTORS = 2.0, 2.0, 2.0, 0.125
"""Of inputs, from call to call: no bf16 loses a bit."""


class OnGpus(ABC):
    """Heaps of all ranks, and what launches them.

    Args:
        gpu_of: of each rank. absent: ranks that do not launch. apart: each rank has a launch of its own.

    Attributes:
        runs: launches, each of the ranks at its place in `groups`: a GPU and ranks of it.
    """

    device = "cuda:{}"

    def __init__(self, plan: RingPlan, gpu_of: Sequence[int], absent: Sequence[int], first: int, apart: bool = False):
        self.gpu_of, self.runs, self.calls = list(gpu_of) or [0] * plan.R, list[RankKernel](), 0
        gpus = sorted(set(self.gpu_of))
        self.heaps = [torch.zeros(plan.heap, dtype=torch.uint8, device=self.device.format(gpu)) for gpu in self.gpu_of]
        if first:
            rings = (plan.intra + 1) * plan.inter * plan.sms * plan.W
            for heap in self.heaps:
                words = heap[256 : 256 + (72 * rings if plan.slot else 64 * plan.R + 4 * plan.sms)].view(torch.int32)
                words.fill_(first)
                if not plan.slot:  # blocks that ended
                    words[8 * plan.R : 16 * plan.R] = first * plan.sms
        if len(gpus) > 1:
            peers.enable(gpus)
        self.addresses = [heap.data_ptr() for heap in self.heaps]
        here = [(gpu, [r for r in range(plan.R) if self.gpu_of[r] == gpu and r not in absent]) for gpu in gpus]
        here = [(gpu, [rank]) for gpu, ranks in here for rank in ranks] if apart else here
        self.groups = [(gpu, ranks) for gpu, ranks in here if ranks]

    def launch(self) -> None:
        for run in self.runs:
            with torch.cuda.device(run.device):
                run.launch()

    def synchronize(self) -> None:
        for gpu in set(self.gpu_of):
            torch.cuda.synchronize(gpu)

    def reports(self) -> list[Stopped | None]:
        return [stopped(heap) for heap in self.heaps]

    def renew(self) -> None:
        """Inputs become others, until the fourth call from now: what a call leaves behind is wrong for the next."""
        self.change(FACTORS[self.calls % 4])
        self.calls += 1

    def change(self, factor: float) -> None:
        """Inputs become so many times what they were, in place."""
        self.change_oracle(factor)
        for _, ranks in self.groups:
            for rank in ranks:
                self.change_at(rank, factor)

    def poison(self) -> None:
        """Outputs become what no call gives."""
        for _, ranks in self.groups:
            for rank in ranks:
                self.poison_at(rank)

    @abstractmethod
    def change_oracle(self, factor: float) -> None:
        """As change, of the oracle's inputs."""

    @abstractmethod
    def change_at(self, rank: int, factor: float) -> None:
        """As change, of a rank's inputs."""

    @abstractmethod
    def outputs_at(self, rank: int) -> list[torch.Tensor]:
        """What a call writes at a rank."""

    def poison_at(self, rank: int) -> None:
        """As poison, of a rank."""
        for tensor in self.outputs_at(rank):
            tensor.view(torch.uint8).fill_(0xA5)

    @abstractmethod
    def wrong(self) -> Sequence[object]:
        """What is not the oracle's, bit for bit."""

    def run(self, calls: int = 1) -> None:
        """Calls, each of which gives what the oracle does, and stops no rank."""
        for _ in range(calls):
            self.renew()
            self.poison()
            self.synchronize()
            self.launch()
            self.synchronize()
            assert self.reports() == [None] * len(self.heaps)
            assert list(self.wrong()) == []

    def run_apart(self, calls: int) -> None:
        """As run, with a stream a rank, and pauses by chance: nothing but the kernels keeps ranks from going ahead."""
        chance = random.Random(5)
        streams = [torch.cuda.Stream(gpu) for gpu, _ in self.groups]
        taken: list[tuple[float, list[list[torch.Tensor]]]] = []

        def pause() -> None:
            if cycles := chance.choice((0, 0, 30_000, 300_000)):
                torch.cuda._sleep(cycles)

        for _ in range(calls):
            factor, outs = FACTORS[self.calls % 4], []
            self.calls += 1
            for stream, run, (_, (rank,)) in zip(streams, self.runs, self.groups, strict=True):
                with torch.cuda.stream(stream):
                    pause()
                    self.change_at(rank, factor)
                    self.poison_at(rank)
                    pause()
                    run.launch()
                    pause()
                    outs.append([out.clone() for out in self.outputs_at(rank)])
            taken.append((factor, outs))
        self.synchronize()
        assert self.reports() == [None] * len(self.heaps)
        for call, (factor, outs) in enumerate(taken):
            self.change_oracle(factor)
            for (_, (rank,)), was in zip(self.groups, outs, strict=True):
                for tensor, kept in zip(self.outputs_at(rank), was, strict=True):
                    tensor.copy_(kept)
            self.synchronize()
            assert list(self.wrong()) == [], f"call {call}"

    def replay(self, calls: int) -> None:
        """As run, from a graph."""
        self.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.launch()
        for _ in range(calls):
            self.renew()
            self.poison()
            self.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            assert list(self.wrong()) == []

    def blames(self, rank: int) -> list[Stopped]:
        """A call that ends with this rank's name in every report; the reports."""
        begun = time.monotonic()
        self.launch()
        self.synchronize()
        assert time.monotonic() - begun < 20
        reports = [report for report in self.reports() if report is not None]
        assert len(reports) == len(self.heaps) and {report.peer for report in reports} == {rank}
        return reports

    def blames_absent(self, rank: int) -> None:
        """As blames, of a rank that does not launch; then the group is dead: nothing waits, nothing changes."""
        reports = self.blames(rank)
        assert {report.role for report in reports} == {Role.OUTSIDE}
        self.launch()
        self.synchronize()
        assert self.reports() == reports


def spread(plan: RingPlan, gpus: int) -> list[int]:
    """gpu_of ranks that share GPUs evenly; skips where they do not."""
    if plan.R % gpus:
        pytest.skip("ranks do not spread evenly")
    return [rank * gpus // plan.R for rank in range(plan.R)]


P = TypeVar("P", bound=RingPlan)


def fast(plan: P, **others: object) -> P:
    """The plan with bulk copies, where the GPU, the wire and the kernel have them; skips where not."""
    if plan.kernel.startswith("few"):
        return replace(plan, **others) if others else pytest.skip("words, not bulk copies")
    if getattr(plan, "wire", plan.dtype) is not plan.dtype or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no bulk copies")
    return replace(plan, bulk=True, **others)


def overlapping(plan: P, bulk: bool) -> P:
    """The plan with launches that overlap, where the GPU has them. bulk: as fast."""
    others = {"overlap": True} if torch.cuda.get_device_capability() >= (9, 0) else {}
    return fast(plan, **others) if bulk else replace(plan, **others)


def stalling(plan: P, rank: int, role: Role) -> P:
    """The plan with a rank that stops in this role, on few and short rings."""
    return replace(plan, stalls=rank, stall_role=role.value, sms=1, channels=2, slots=1)


def gpu_counts() -> list[int]:
    """Numbers of GPUs to spread ranks over."""
    return [n for n in (1, 2, 4) if n <= max(torch.cuda.device_count(), 1)]


def _become(inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], factor: float) -> None:
    hidden, ids, weights = inputs
    hidden *= factor
    weights *= factor
    ids.copy_(ids.roll(1, 0))


class DispatchOnGpus(OnGpus):
    """All ranks of a dispatch, with inputs. E: experts, of which ids name some, and -1, and too large ones."""

    def __init__(
        self,
        plan: DispatchPlan | NodeDispatchPlan,
        tokens: Sequence[int],
        gpu_of: Sequence[int] = (),
        timeout: float = 5.0,
        absent: Sequence[int] = (),
        first: int = 0,
        each: int = 2,
        apart: bool = False,
    ):
        super().__init__(plan, gpu_of, absent, first, apart)
        self.plan, R = plan, plan.R
        E, g = each * R, torch.Generator().manual_seed(11)
        self.placement = Placement.from_mapping(torch.randperm(E, generator=g).view(R, each).tolist())
        self.origins = []
        for T in tokens:
            ids = torch.randint(-1, E + 1, (T, plan.K), generator=g, dtype=torch.int32)
            hidden, weights = torch.randn(T, plan.H, generator=g).to(plan.dtype), torch.rand(T, plan.K, generator=g)
            self.origins.append((hidden, ids, weights))
        self.received: dict[int, dict[str, torch.Tensor]] = {}
        self.bound: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.keep: list[object] = []
        for gpu, ranks in self.groups:
            device = self.device.format(gpu)
            run: RankDispatch | NodeDispatch
            if isinstance(plan, NodeDispatchPlan):
                run = NodeDispatch(plan, self.placement, gpu, ranks, self.addresses, timeout)
            else:
                run = RankDispatch(plan, self.placement, gpu, ranks, self.addresses, timeout)
            self.runs.append(run)
            for n, rank in enumerate(ranks):
                hidden, ids, weights = (one.to(device) for one in self.origins[rank])
                inputs = hidden, ids, weights, torch.tensor([tokens[rank]], dtype=torch.int32, device=device)
                self.keep.append(inputs)
                self.bound[rank] = hidden, ids, weights
                if isinstance(run, RankDispatch):
                    into = Received.empty(run.plan, device)
                    run.bind(n, *inputs, into)
                    self.received[rank] = vars(into)
                else:
                    where = torch.empty(R, plan.T, dtype=torch.int32, device=device)
                    firsts = torch.empty(R + 1, dtype=torch.int32, device=device)
                    run.bind(n, *inputs, where, firsts)
                    rows, row_ids, row_weights = run.plan.rows(self.heaps[rank])
                    made = {"rows": rows, "ids": row_ids, "weights": row_weights, "where": where}
                    made |= {"origins": run.plan.origins(self.heaps[rank]), "firsts": firsts}
                    self.received[rank] = made
        self.poison()
        self.synchronize()

    def change_oracle(self, factor: float) -> None:
        for inputs in self.origins:
            _become(inputs, factor)

    def change_at(self, rank: int, factor: float) -> None:
        _become(self.bound[rank], factor)

    def outputs_at(self, rank: int) -> list[torch.Tensor]:
        return list(self.received[rank].values())

    def wrong(self) -> list[tuple[int, str]]:
        """(rank, tensor) that are not the oracle's, bit for bit."""
        found: list[tuple[int, str]] = []
        masks = [rank_masks(ids, self.placement) for _, ids, _ in self.origins]
        for rank, received in self.received.items():
            rows, ids, weights = delivered(self.origins, self.placement, rank)
            A, T = len(rows), len(masks[rank])
            want = {"rows": rows, "ids": ids, "weights": weights, "A": torch.tensor([A]).int()}
            want |= zip(("masks", "row_of", "tokens"), pointers(masks, self.plan.T, rank), strict=True)
            want["where"] = rows_at(masks, self.plan.T, rank)[:, :T]
            origins, want["firsts"] = origins_at(masks, self.plan.T, rank)
            want["origins"] = origins[:A]
            for name, tensor in received.items():
                got = tensor.cpu()
                got = (
                    got[:A] if name in ("rows", "ids", "weights", "origins") else got[:, :T] if name == "where" else got
                )
                if not torch.equal(got, want[name]):
                    found.append((rank, name))
        return found


class GpuRanks(OnGpus):
    """All ranks of a combine, with inputs."""

    def __init__(
        self,
        plan: Plan | NodeCombinePlan,
        tokens: Sequence[int],
        gpu_of: Sequence[int] = (),
        biases: bool = True,
        timeout: float = 5.0,
        absent: Sequence[int] = (),
        first: int = 0,
        apart: bool = False,
    ):
        super().__init__(plan, gpu_of, absent, first, apart)
        self.plan, self.tokens, self.biases = plan, tokens, biases
        g = torch.Generator().manual_seed(7)
        R, H = plan.R, plan.H
        self.masks = [torch.randint(0, 1 << R, (T,), generator=g) for T in tokens]
        # [R, T, H] of each destination
        self.parts = [torch.randn(R, T, H, generator=g).to(plan.dtype) for T in tokens]
        if plan.dtype is torch.bfloat16:  # the first and the last rank cancel: such a sum shows its order
            for part in self.parts:
                part[0, ::2] *= 2.0**16
                part[-1, ::2] = -part[0, ::2]
        self.added = [torch.randn(2, T, H, generator=g).to(plan.dtype) for T in tokens]
        self.outs: dict[int, torch.Tensor] = {}
        self.bound: dict[int, torch.Tensor] = {}
        self.keep: list[object] = []
        for gpu, ranks in self.groups:
            run: RankCombine | NodeCombine
            if isinstance(plan, NodeCombinePlan):
                run = NodeCombine(plan, gpu, ranks, self.addresses, timeout)
            else:
                run = RankCombine(plan, gpu, ranks, self.addresses, timeout)
            self.runs.append(run)
            for n, rank in enumerate(ranks):
                self._bind(run, n, rank, self.device.format(gpu))
        self.synchronize()

    def _bind(self, run: RankCombine | NodeCombine, n: int, rank: int, device: str) -> None:
        x = torch.cat([part[rank][mask >> rank & 1 == 1] for part, mask in zip(self.parts, self.masks, strict=True)])
        masks, rows, T = pointers([mask.to(device) for mask in self.masks], self.plan.T, rank)
        out = torch.full((self.tokens[rank], self.plan.H), float("nan"), dtype=self.plan.dtype, device=device)
        bias_0, bias_1 = self.added[rank].to(device) if self.biases else (None, None)
        self.outs[rank] = out
        if isinstance(run, NodeCombine):
            where, own = rows_at(self.masks, self.plan.T, rank).to(device), T[rank : rank + 1]
            rows_there = run.plan.rows(self.heaps[rank])[: len(x)]
            rows_there.copy_(x)
            self.bound[rank] = rows_there
            origins = [one.to(device) for one in origins_at(self.masks, self.plan.T, rank)]
            run.bind(n, where, *origins, own, out, bias_0, bias_1)
            self.keep.append((where, own, bias_0, bias_1, origins))
        else:
            tensors = x.to(device), masks, rows, T, out, bias_0, bias_1
            run.bind(n, *tensors)
            self.keep.append(tensors)
            self.bound[rank] = tensors[0]

    def change_oracle(self, factor: float) -> None:
        for part in self.parts:
            part *= factor

    def change_at(self, rank: int, factor: float) -> None:
        self.bound[rank] *= factor

    def outputs_at(self, rank: int) -> list[torch.Tensor]:
        return [self.outs[rank]]

    def wrong(self) -> list[int]:
        """Ranks whose output is not the oracle's, bit for bit."""
        nodes = Nodes(self.plan.inter, self.plan.intra)
        wire = self.plan.dtype if isinstance(self.plan, NodeCombinePlan) else self.plan.wire
        return [
            rank
            for rank, (part, mask) in enumerate(zip(self.parts, self.masks, strict=True))
            if not torch.equal(
                self.outs[rank].cpu(),
                tree_sum(part, mask, nodes, rank, wire, list(self.added[rank]) if self.biases else ()),
            )
        ]
