"""Combine of all pairs: the experts' rank sums its rows of a token, node_combine sums ranks; NCCL moves every pair.

    PYTHONPATH=. python benchmarks/combine_pairs.py [--size 4096x7168] [--out FILE]

A process each GPU, two or more. Every token has K / R pairs on each of R ranks, so T x K x (R - 1) / R pairs lie on
other GPUs. Those bytes over the time are `pair_gb`; `gb` counts the rows that travel, one a token and other rank. Times
and the gate are those of combine.py: 20 calls, each equal to the oracle bit for bit.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from combine import CombineRanks, join, timed, write
from torch import Tensor

from ttnn_moe.cuda.arch import find
from ttnn_moe.cuda.combine.kernel import RingPlan
from ttnn_moe.cuda.combine.node import NodeCombinePlan
from ttnn_moe.cuda.device import gpu as properties
from ttnn_moe.cuda.jit import load
from ttnn_moe.cuda.moe import sort
from ttnn_moe.cuda.moe.uses import Use


@dataclass
class Result:
    """Microseconds of a call on the slowest GPU, and GB/s: see the top.

    Attributes:
        sum_us: of the ranks' own sums. combine_us: of node_combine. us: of both, one after the other.
        nccl_us: of all_to_all_single of all pairs, which numbers and sums none.
    """

    T: int
    H: int
    K: int
    sms: int
    right: bool
    sum_us: float
    combine_us: float
    us: float
    gb: float
    pair_gb: float
    nccl_us: float
    nccl_pair_gb: float


class PairRanks(CombineRanks):
    """One rank a GPU, whose rows of combine are sums of pairs."""

    def __init__(self, plan: NodeCombinePlan, K: int):
        self.each = each = K // plan.R
        super().__init__(plan, 1)
        rank, R, T = self.gpu, plan.R, plan.T
        pairs = torch.cat([pairs_of(c, rank, plan, each) for c in range(R)]).flatten(0, 1)
        weights = torch.cat([weights_of(c, rank, plan, each) for c in range(R)])
        # an expert's rows lie together, so a token's rows do not
        order = torch.randperm(len(pairs), generator=torch.Generator("cuda").manual_seed(rank), device="cuda")
        rows = torch.empty_like(pairs)
        rows[order] = pairs
        inverse = torch.full((R * T, K), -1, dtype=torch.int32, device="cuda")
        inverse[:, rank::R] = order.int().view(-1, each)
        spread = torch.zeros(R * T, K, device="cuda")
        spread[:, rank::R] = weights
        arch = find(properties(rank))
        assert arch is not None
        use = Use.of(arch, "common/combine", FP16=False, TOP_K=K, ADD=False, OUT32=False, DISCARD=False)
        launch = sort.bind_combine(use, rank, R * T, plan.H)
        into = plan.rows(self.memory)
        into.view(torch.uint8).fill_(0xA5)
        given = rows.data_ptr(), inverse.data_ptr(), spread.data_ptr(), 0, into.data_ptr()
        self.kept, self.given = (rows, inverse, spread), [rows]
        self.sums = lambda: launch(load.stream(rank), *given)
        self.across = self.call.launch
        self.call = SimpleNamespace(launch=self.both)
        torch.cuda.synchronize()
        dist.barrier()

    def rows(self, c: int, rank: int) -> Tensor:
        """[T, H] sums of `rank`'s pairs of rank c's tokens, in the dtype of the rows: fp32 sums in ascending k."""
        plan = self.plan
        pairs, weights = pairs_of(c, rank, plan, self.each), weights_of(c, rank, plan, self.each)
        total = torch.zeros(plan.T, plan.H, device="cuda")
        for k in range(self.each):
            total += weights[:, k, None] * pairs[:, k].float()
        return total.to(plan.dtype)

    def both(self) -> None:
        self.sums()
        self.across()


def pairs_of(c: int, rank: int, plan: RingPlan, each: int) -> Tensor:
    """[T, each, H] outputs of rank's experts for rank c's tokens; the same on every machine."""
    g = torch.Generator("cuda").manual_seed(1000 * c + rank)
    return torch.randn(plan.T, each, plan.H, generator=g, device="cuda").to(plan.dtype)


def weights_of(c: int, rank: int, plan: RingPlan, each: int) -> Tensor:
    """[T, each] powers of two, so that products are exact and fused additions round as separate ones."""
    g = torch.Generator("cuda").manual_seed(77 + 1000 * c + rank)
    return torch.exp2(-torch.randint(4, (plan.T, each), generator=g, device="cuda").float())


def process(gpu: int, gpus: int, options: argparse.Namespace) -> None:
    join(gpu, gpus)
    T, H = map(int, options.size.split("x"))
    plan = NodeCombinePlan(1, gpus, H, T, sms=24, overlap=True, bulk=True)
    x = torch.randn(T * options.K, H, device="cuda").to(plan.dtype)
    out = torch.empty_like(x)
    nccl = timed(lambda: dist.all_to_all_single(out, x))
    ranks = PairRanks(plan, options.K)
    right = ranks.right(20)
    times = [timed(call) for call in (ranks.sums, ranks.across, ranks.both)]
    rows, pairs = (count * H * 2 / 1e3 * (gpus - 1) for count in (T, T * options.K / gpus))
    rates = rows / times[2], pairs / times[2], nccl, pairs / nccl
    result = Result(T, H, options.K, plan.sms, right, *(round(number, 2) for number in (*times, *rates)))
    if gpu == 0:
        print(result, flush=True)
        if options.out:
            write(options.out, gpus, [asdict(result)])
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="4096x7168", help="T x H")
    parser.add_argument("--K", type=int, default=8, help="experts of a token; a multiple of the GPUs")
    parser.add_argument("--out")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    if gpus < 2 or options.K % gpus:
        parser.error(f"got {gpus} GPUs and K={options.K}; expected two GPUs or more, and K a multiple of them")
    torch.multiprocessing.spawn(process, (gpus, options), nprocs=gpus)


if __name__ == "__main__":
    main()
