"""Combine of ranks across the GPUs of one host, beside NCCL's all_to_all_single in the same run. Needs two GPUs.

    python benchmarks/combine.py [--inter 1] [--sizes 4096x7168 128x2048] [--variants '{"sms": 24}'] [--out FILE]

A process each GPU; ranks share GPUs evenly (--ranks a GPU). Every token has a row on every rank, the most that travels.
A time is a call inside a CUDA graph of 20, the slowest GPU's, the median of the replays. GB/s count the bytes that one
GPU sends to others. A time stands only behind the gate: 20 calls, each equal to the tree oracle bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from ttnn_moe.cuda.combine.rank_combine import Plan, RankCombine, pointers, stopped
from ttnn_moe.parallel.hierarchical import Nodes, tree_sum

CALLS, REPLAYS = 20, 7
DEFAULT = [
    '{"sms": 24, "channels": 12}',
    '{"sms": 24, "overlap": true}',
    '{"sms": 4, "overlap": true}',
    '{"sms": 24, "overlap": true, "bulk": true}',
    '{"sms": 24, "overlap": true, "bulk": true, "send_rows": 1, "stages": 4}',
]


@dataclass
class Result:
    """One line. us: a call; gb: GB/s to other GPUs; nccl_us: all_to_all_single of the same rows, without a sum."""

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
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            took = torch.tensor([start.elapsed_time(end) * 1000 / CALLS], device="cuda")
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            times.append(took.item())
    return statistics.median(times[1:])


class Ranks:
    """The ranks of this process's GPU."""

    def __init__(self, plan: Plan, each: int):
        gpu, self.plan = dist.get_rank(), plan
        self.memory = symmetric.empty(each * plan.heap, dtype=torch.uint8, device=f"cuda:{gpu}")
        self.memory.zero_()
        handle = symmetric.rendezvous(self.memory, dist.group.WORLD)
        heaps = [handle.buffer_ptrs[rank // each] + rank % each * plan.heap for rank in range(plan.R)]
        torch.cuda.synchronize()
        dist.barrier()
        self.ranks = range(gpu * each, (gpu + 1) * each)
        self.call = RankCombine(plan, gpu, self.ranks, heaps, timeout=2.0)
        full = torch.full((plan.T,), (1 << plan.R) - 1, device="cuda")
        self.outs, self.keep = [], []
        for n, rank in enumerate(self.ranks):
            # a rank's row of token t of rank c is the same on every machine
            x = torch.cat([rows_of(c, rank, plan) for c in range(plan.R)])
            out = torch.empty(plan.T, plan.H, dtype=plan.dtype, device="cuda")
            tensors = x, *pointers([full] * plan.R, plan.T, rank), out
            self.call.bind(n, *tensors)
            self.keep.append(tensors)
            self.outs.append(out)

    def right(self, repeats: int) -> bool:
        plan, good = self.plan, True
        nodes, full = Nodes(plan.inter, plan.intra), torch.full((plan.T,), (1 << plan.R) - 1, device="cuda")
        want = []
        for rank in self.ranks:
            rows = torch.stack([rows_of(rank, r, plan) for r in range(plan.R)])
            want.append(tree_sum(rows, full, nodes, rank, plan.wire))
        for _ in range(repeats):
            for out in self.outs:
                out.fill_(float("nan"))
            self.call.launch()
            good &= all(torch.equal(out, one) for out, one in zip(self.outs, want, strict=True))
        report = stopped(self.memory)
        if report:
            print(report, flush=True)
        verdict = torch.tensor([good and report is None], dtype=torch.int32, device="cuda")
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        return bool(verdict.item())


def rows_of(c: int, rank: int, plan: Plan) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(1000 * c + rank)
    return torch.randn(plan.T, plan.H, generator=g, device="cuda", dtype=torch.float32).to(plan.dtype)


def nccl(plan: Plan, gpus: int) -> float:
    x = torch.randn(gpus * plan.T, plan.H, device="cuda").to(plan.wire)
    out = torch.empty_like(x)
    return timed(lambda: dist.all_to_all_single(out, x))


def process(gpu: int, gpus: int, options: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", rank=gpu, world_size=gpus, device_id=torch.device("cuda", gpu))
    R = gpus * options.ranks
    found = []
    for size in options.sizes:
        T, H = map(int, size.split("x"))
        beside = nccl(Plan(1, R, H, T), gpus)
        for variant in options.variants:
            plan = Plan(options.inter, R // options.inter, H, T, **json.loads(variant))
            found.append(measure(plan, gpus, options, beside, variant))
            if gpu == 0:
                print(*asdict(found[-1]).values(), flush=True)
    if gpu == 0 and options.out:
        name = torch.cuda.get_device_name()
        lines = {"device": f"{gpus} x {name}", "torch": torch.__version__, "rows": [asdict(one) for one in found]}
        Path(options.out).write_text(json.dumps(lines, indent=1) + "\n")
    dist.barrier()
    os._exit(0)


def measure(plan: Plan, gpus: int, options: argparse.Namespace, beside: float, variant: str) -> Result:
    each = options.ranks
    ranks = Ranks(plan, each)
    right = ranks.right(options.repeats)
    us = timed(ranks.call.launch) if right else float("nan")
    # rows that leave a GPU: to ranks of the node elsewhere, or partials to other nodes
    nodes = Nodes(plan.inter, plan.intra)
    remote = 0
    for c in range(plan.R):
        for n in range(plan.inter):
            forwarder = nodes.rank(n, nodes.place(c)[1])
            crossing = [r for r in (nodes.rank(n, la) for la in range(plan.intra)) if r // each != forwarder // each]
            remote += len(crossing) + (forwarder // each != c // each)
    row = plan.T * plan.H * plan.wire.itemsize
    total = remote * row / gpus
    topology = f"{plan.inter}x{plan.intra} on {gpus}"
    rates = round(us, 2), round(total / us / 1e3, 1), round(beside, 2), round((gpus - 1) * row / beside / 1e3, 1)
    return Result(topology, plan.T, plan.H, variant, plan.sms, plan.W, right, *rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["4096x7168", "128x2048", "1x2048"], help="T x H")
    parser.add_argument("--variants", nargs="+", default=DEFAULT, help="fields of rank_combine.Plan, in JSON")
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
