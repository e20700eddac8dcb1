"""Ranks of one group on the GPUs of this process: several a GPU (virtual ranks), or one each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ttnn_moe.cuda.combine import peers
from ttnn_moe.cuda.combine.rank_combine import Plan, RankCombine, Stopped, pointers, stopped
from ttnn_moe.parallel.hierarchical import Nodes, tree_sum


class GpuRanks:
    """All ranks, with inputs. gpu_of: of each rank. absent: ranks that do not launch."""

    def __init__(
        self,
        plan: Plan,
        tokens: Sequence[int],
        gpu_of: Sequence[int] = (),
        biases: bool = True,
        timeout: float = 5.0,
        absent: Sequence[int] = (),
        first: int = 0,
    ):
        self.plan, self.tokens, self.biases = plan, tokens, biases
        self.gpu_of = list(gpu_of) or [0] * plan.R
        gpus = sorted(set(self.gpu_of))
        self.heaps = [torch.zeros(plan.heap, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in self.gpu_of]
        if first:
            rings = (plan.intra + 1) * plan.inter * plan.sms * plan.W
            for heap in self.heaps:
                heap[256 : 256 + 72 * rings].view(torch.int32).fill_(first)
        if len(gpus) > 1:
            peers.enable(gpus)
        addresses = [heap.data_ptr() for heap in self.heaps]
        g = torch.Generator().manual_seed(7)
        R, H = plan.R, plan.H
        self.masks = [torch.randint(0, 1 << R, (T,), generator=g) for T in tokens]
        # [R, T, H] of each destination
        self.parts = [torch.randn(R, T, H, generator=g).to(plan.dtype) for T in tokens]
        self.added = [torch.randn(2, T, H, generator=g).to(plan.dtype) for T in tokens]
        self.outs: list[torch.Tensor] = []
        self.keep: list[object] = []
        self.runs: list[RankCombine] = []
        for gpu in gpus:
            ranks = [rank for rank in range(R) if self.gpu_of[rank] == gpu and rank not in absent]
            if ranks:
                self.runs.append(RankCombine(plan, gpu, ranks, addresses, timeout))
        for run in self.runs:
            for n, rank in enumerate(run.ranks):
                self._bind(run, n, rank, f"cuda:{run.device}")
        self.synchronize()

    def _bind(self, run: RankCombine, n: int, rank: int, device: str) -> None:
        x = torch.cat([part[rank][mask >> rank & 1 == 1] for part, mask in zip(self.parts, self.masks, strict=True)])
        masks, rows, T = pointers([mask.to(device) for mask in self.masks], self.plan.T, rank)
        out = torch.full((self.tokens[rank], self.plan.H), float("nan"), dtype=self.plan.dtype, device=device)
        bias_0, bias_1 = self.added[rank].to(device) if self.biases else (None, None)
        tensors = x.to(device), masks, rows, T, out, bias_0, bias_1
        run.bind(n, *tensors)
        self.outs.append(out)
        self.keep.append(tensors)

    def launch(self) -> None:
        for run in self.runs:
            with torch.cuda.device(run.device):
                run.launch()

    def synchronize(self) -> None:
        for gpu in set(self.gpu_of):
            torch.cuda.synchronize(gpu)

    def poison(self) -> None:
        for out in self.outs:
            out.fill_(float("nan"))

    def wrong(self) -> list[int]:
        """Ranks whose output is not the oracle's, bit for bit."""
        nodes = Nodes(self.plan.inter, self.plan.intra)
        return [
            rank
            for rank, (part, mask) in enumerate(zip(self.parts, self.masks, strict=True))
            if not torch.equal(
                self.outs[rank].cpu(),
                tree_sum(part, mask, nodes, rank, self.plan.wire, self.added[rank] if self.biases else ()),
            )
        ]

    def reports(self) -> list[Stopped | None]:
        return [stopped(heap) for heap in self.heaps]
