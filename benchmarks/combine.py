"""Dispatch and combine of ranks across GPUs of one host, beside NCCL's all_to_all_single in the same run. Two or more.

    python benchmarks/combine.py [--inter 1] [--sizes 4096x7168 128x2048] [--variants '{"sms": 24}'] [--out FILE]

A process each GPU; ranks share GPUs evenly (--ranks a GPU). Every token has a row on every rank, the most that travels.
A time is a call inside a CUDA graph of 20, the slowest GPU's, the median of the replays. GB/s count the bytes of rows
that one GPU sends to others. A time stands only behind the gate: 20 calls, each equal to the oracle bit for bit. A
dispatch includes the exchange of its masks. With --inter 2 and --ranks 4, two GPUs stand for two nodes of four ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from command_line import write as write_json

from ttnn_moe.contract import Placement
from ttnn_moe.cuda.combine.few import FewCombinePlan, FewDispatchPlan
from ttnn_moe.cuda.combine.kernel import STATUS, RingPlan, stopped
from ttnn_moe.cuda.combine.node import NodeCombine, NodeCombinePlan, NodeDispatch, NodeDispatchPlan, origins_at, rows_at
from ttnn_moe.cuda.combine.rank_combine import Plan, RankCombine, pointers
from ttnn_moe.cuda.combine.rank_dispatch import DispatchPlan, RankDispatch, Received
from ttnn_moe.parallel.exchanges.exchange import world_of
from ttnn_moe.parallel.hierarchical import Nodes, tree_sum

CALLS, REPLAYS = 20, 7
DEFAULT = [
    '{"sms": 24, "overlap": true, "bulk": true}',
    '{"sms": 24, "overlap": true, "bulk": true, "slots": 8}',
    '{"sms": 24, "overlap": true}',
    '{"op": "dispatch", "sms": 24, "overlap": true, "bulk": true}',
    '{"op": "dispatch", "sms": 24, "overlap": true}',
]


PLANS = {
    "combine": Plan,
    "dispatch": DispatchPlan,
    "node_combine": NodeCombinePlan,
    "node_dispatch": NodeDispatchPlan,
    "few_combine": FewCombinePlan,
    "few_dispatch": FewDispatchPlan,
}
"""By op: through rings; in one node, in place; of few tokens, in one hop."""


@dataclass
class Result:
    """One line.

    Attributes:
        op: see PLANS. us: of a call. gb: GB/s to other GPUs.
        nccl_us, nccl_gb: all_to_all_single of the same rows, without a sum.
        between: rows that crossed between nodes in a call, as the rings of all ranks counted them. flat: rows that
            would cross if each rank sent to each.
    """

    op: str
    topology: str
    T: int
    H: int
    variant: str
    sms: int
    channels: int
    right: bool
    us: float
    gb: float
    nccl_us: float
    nccl_gb: float
    between: int = 0
    flat: int = 0


def timed(call: Callable[[], None]) -> float:
    """Microseconds a call, on the slowest GPU."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
        times = []
        for _ in range(REPLAYS):
            dist.barrier()
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()  # its calls wait for each other, so the GPUs begin the next one together
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            took = torch.tensor([start.elapsed_time(end) * 1000 / CALLS], device="cuda")
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            times.append(took.item())
    return statistics.median(times[1:])


class Call(Protocol):
    def launch(self) -> None: ...


class Ranks:
    """The ranks of this process's GPU."""

    def __init__(self, plan: RingPlan, each: int):
        gpu, self.plan = dist.get_rank(), plan
        self.memory: torch.Tensor = symmetric.empty(
            each * plan.heap, dtype=torch.uint8, device=torch.device("cuda", gpu)
        )
        self.memory.zero_()
        handle = symmetric.rendezvous(self.memory, world_of(None))
        self.heaps = [handle.buffer_ptrs[rank // each] + rank % each * plan.heap for rank in range(plan.R)]
        torch.cuda.synchronize()
        dist.barrier()
        self.call: Call
        self.gpu, self.ranks = gpu, range(gpu * each, (gpu + 1) * each)
        self.given: list[torch.Tensor] = []
        self.outs: list[torch.Tensor] = []
        self.want: list[torch.Tensor] = []

    def between(self) -> int:
        """Rows that all ranks ever put into rings between nodes."""
        plan, items = self.plan, 0
        if not plan.slot:
            return 0
        C, entries = plan.sms * plan.W, (plan.intra + 1) * plan.inter
        for heap in self.memory.split(plan.heap):
            sent = heap[STATUS + 68 * entries * C :][: 4 * entries * C].view(torch.int32).view(entries, C)
            items += int(sent[plan.intra * plan.inter :].sum())
        count = torch.tensor([items], device="cuda")
        dist.all_reduce(count)
        return int(count)

    def right(self, repeats: int) -> bool:
        good = True
        for call in range(repeats):
            torch.cuda.synchronize()
            dist.barrier()
            # other numbers than in the calls before, whose words and rows may still lie there; no bf16 loses a bit
            for x in (*self.given, *(one for one in self.want if one.is_floating_point())):
                x *= (2.0, 2.0, 2.0, 0.125)[call % 4]
            for out in self.outs:
                out.view(torch.uint8).fill_(0xA5)
            # a peer's launch writes into these
            torch.cuda.synchronize()
            dist.barrier()
            self.call.launch()
            good &= all(torch.equal(out[: len(one)], one) for out, one in zip(self.outs, self.want, strict=True))
        report = stopped(self.memory)
        if report:
            print(report, flush=True)
        verdict = torch.tensor([good and report is None], dtype=torch.int32, device="cuda")
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        return bool(verdict.item())


class CombineRanks(Ranks):
    def __init__(self, plan: Plan | NodeCombinePlan, each: int):
        super().__init__(plan, each)
        call: RankCombine | NodeCombine
        if isinstance(plan, NodeCombinePlan):
            call, wire = NodeCombine(plan, self.gpu, self.ranks, self.heaps, timeout=2.0), plan.dtype
        else:
            call, wire = RankCombine(plan, self.gpu, self.ranks, self.heaps, timeout=2.0), plan.wire
        self.call = call
        full = torch.full((plan.T,), (1 << plan.R) - 1, device="cuda")
        nodes, self.keep = Nodes(plan.inter, plan.intra), list[object]()
        for n, rank in enumerate(self.ranks):
            x = torch.cat([self.rows(c, rank) for c in range(plan.R)])
            out = torch.empty(plan.T, plan.H, dtype=plan.dtype, device="cuda")
            masks, rows, T = pointers([full] * plan.R, plan.T, rank)
            if isinstance(call, NodeCombine):
                where = rows_at([full] * plan.R, plan.T, rank)
                there = call.plan.rows(self.memory[n * plan.heap :])
                there[:] = x
                self.given.append(there)
                origins = origins_at([full] * plan.R, plan.T, rank)
                call.bind(n, where, *origins, T, out)
                self.keep.append((where, T, origins))
            else:
                call.bind(n, x, masks, rows, T, out)
                self.keep.append((x, masks, rows, T))
                self.given.append(x)
            self.outs.append(out)
            stacked = torch.stack([self.rows(rank, r) for r in range(plan.R)])
            self.want.append(tree_sum(stacked, full, nodes, rank, wire))
        torch.cuda.synchronize()
        dist.barrier()

    def rows(self, c: int, rank: int) -> torch.Tensor:
        """[T, H] rows of `rank` for rank c's tokens; the same on every machine."""
        return rows_of(c, rank, self.plan)


class DispatchRanks(Ranks):
    def __init__(self, plan: DispatchPlan | NodeDispatchPlan, each: int):
        super().__init__(plan, each)
        placement, self.keep = Placement.uniform(16 * plan.R, plan.R), list[object]()
        call: RankDispatch | NodeDispatch
        if isinstance(plan, NodeDispatchPlan):
            call = NodeDispatch(plan, placement, self.gpu, self.ranks, self.heaps, timeout=2.0)
        else:
            call = RankDispatch(plan, placement, self.gpu, self.ranks, self.heaps, timeout=2.0)
        self.call = call
        g = torch.Generator("cuda").manual_seed(5)
        # each token has an expert on every rank
        first = torch.arange(plan.K, device="cuda") % plan.R * 16
        ids = [(first + torch.randint(16, (plan.T, plan.K), generator=g, device="cuda")).int() for _ in range(plan.R)]
        weights = [torch.rand(plan.T, plan.K, generator=g, device="cuda") for _ in range(plan.R)]
        for n, rank in enumerate(self.ranks):
            count = torch.tensor([plan.T], dtype=torch.int32, device="cuda")
            tensors = rows_of(rank, rank, plan), ids[rank], weights[rank], count
            self.given += [tensors[0], weights[rank]]
            if isinstance(call, NodeDispatch):
                where = torch.empty(plan.R, plan.T, dtype=torch.int32, device="cuda")
                firsts = torch.empty(plan.R + 1, dtype=torch.int32, device="cuda")
                call.bind(n, *tensors, where, firsts)
                self.outs += call.plan.rows(self.memory[n * plan.heap :])
                self.keep.append((tensors, where, firsts))
            else:
                into = Received.empty(call.plan, "cuda")
                call.bind(n, *tensors, into)
                self.outs += [into.rows, into.ids, into.weights]
                self.keep.append((tensors, into))
            local = placement.local_of(rank).cuda()
            self.want += [torch.cat([rows_of(c, c, plan) for c in range(plan.R)])]
            self.want += [local[torch.cat(ids).long()], torch.cat(weights)]


def rows_of(c: int, rank: int, plan: RingPlan) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(1000 * c + rank)
    return torch.randn(plan.T, plan.H, generator=g, device="cuda", dtype=torch.float32).to(plan.dtype)


def nccl(plan: Plan, gpus: int) -> float:
    x = torch.randn(gpus * plan.T, plan.H, device="cuda").to(plan.wire)
    out = torch.empty_like(x)
    return timed(lambda: dist.all_to_all_single(out, x))


def join(gpu: int, gpus: int) -> None:
    """Make this process one of NCCL's, on its GPU."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", rank=gpu, world_size=gpus, device_id=torch.device("cuda", gpu))


def write(path: str, gpus: int, rows: list[dict[str, Any]]) -> None:
    """A JSON of results, and where they were measured."""
    where = {"device": f"{gpus} x {torch.cuda.get_device_name()}", "torch": torch.__version__}
    write_json(Path(path), where | {"rows": rows})


def process(gpu: int, gpus: int, options: argparse.Namespace) -> None:
    join(gpu, gpus)
    R = gpus * options.ranks
    found = []
    for size in options.sizes:
        T, H = map(int, size.split("x"))
        beside = nccl(Plan(1, R, H, T), gpus)
        for variant in options.variants:
            fields = json.loads(variant)
            if size not in fields.pop("sizes", options.sizes):
                continue
            plan = PLANS[fields.pop("op", "combine")](options.inter, R // options.inter, H, T, **fields)
            found.append(measure(plan, gpus, options, beside, json.dumps(fields)))
            if gpu == 0:
                print(*asdict(found[-1]).values(), flush=True)
    if gpu == 0 and options.out:
        write(options.out, gpus, [asdict(one) for one in found])
    dist.barrier()
    os._exit(0)


def measure(plan: RingPlan, gpus: int, options: argparse.Namespace, beside: float, variant: str) -> Result:
    each = options.ranks
    ranks: Ranks
    op = next(name for name, kind in PLANS.items() if type(plan) is kind)
    if isinstance(plan, DispatchPlan | NodeDispatchPlan):
        wire, ranks = plan.dtype, DispatchRanks(plan, each)
    else:
        assert isinstance(plan, Plan | NodeCombinePlan)
        wire, ranks = plan.wire if isinstance(plan, Plan) else plan.dtype, CombineRanks(plan, each)
    begun = ranks.between()
    right = ranks.right(options.repeats)
    between = (ranks.between() - begun) // options.repeats
    flat = plan.R * (plan.R - plan.intra) * plan.T
    us = timed(ranks.call.launch) if right else float("nan")
    # rows that leave a GPU: to ranks of a node elsewhere; to other nodes, or partials from them
    nodes = Nodes(plan.inter, plan.intra)
    remote = 0
    for c in range(plan.R):
        for n in range(plan.inter):
            forwarder = nodes.rank(n, nodes.place(c)[1])
            crossing = [r for r in (nodes.rank(n, la) for la in range(plan.intra)) if r // each != forwarder // each]
            remote += len(crossing) + (forwarder // each != c // each)
    row = plan.T * plan.H * wire.itemsize
    total = remote * row / gpus
    topology = f"{plan.inter}x{plan.intra} on {gpus}"
    rates = round(us, 2), round(total / us / 1e3, 1), round(beside, 2), round((gpus - 1) * row / beside / 1e3, 1)
    return Result(op, topology, plan.T, plan.H, variant, plan.sms, plan.W, right, *rates, between, flat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["4096x7168", "128x2048", "1x2048"], help="T x H")
    parser.add_argument("--variants", nargs="+", default=DEFAULT, help="fields of Plan or DispatchPlan, op, sizes")
    parser.add_argument("--inter", type=int, default=1, help="nodes")
    parser.add_argument("--ranks", type=int, default=1, help="of a GPU")
    parser.add_argument("--repeats", type=int, default=20, help="of the gate")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--out")
    options = parser.parse_args()
    gpus = options.gpus or torch.cuda.device_count()
    if gpus < 2:
        parser.error("two GPUs or more are needed")
    print(*Result.__dataclass_fields__, flush=True)
    torch.multiprocessing.spawn(process, (gpus, options), nprocs=gpus)


if __name__ == "__main__":
    main()
