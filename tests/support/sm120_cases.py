"""MXFP4 layers for the kernels of compute capability 12.x, a call with any tile, and its error."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mxfp4_cases import as_gpt_oss
from ttnn_moe import Experts, Problem, Routing
from ttnn_moe.cuda.arch import HOPPER, Arch
from ttnn_moe.cuda.moe.family import Call, numerics_of
from ttnn_moe.cuda.moe.mxfp4_tiles import Tile
from ttnn_moe.cuda.moe.sm120_mxfp4 import Sm120Mxfp4
from ttnn_moe.selfcheck.bounds import poisoned, worst_error
from ttnn_moe.selfcheck.oracle import oracle

BF16 = torch.bfloat16
ROUTINGS = ("random", "skewed", "one expert", "duplicates", "absent", "out of range")


def experts_of(E: int, H: int, I: int, order: str = "halves", seed: int = 0, device: str = "cpu") -> Experts:
    """Weights of any bits; scales of 2^-3 to 2^2 around the size that keeps outputs near 1."""
    g = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, rows, channels in (("gate_up", 2 * I, H), ("down", H, I)):
        around = 127 - int(torch.tensor(channels).log2()) // 2
        shape = E, rows, channels
        tensors[f"{name}_blocks"] = _bytes(g, (*shape[:2], channels // 2), 0, 256)
        tensors[f"{name}_scales"] = _bytes(g, (*shape[:2], channels // 32), around - 3, around + 2)
    return Experts("mxfp4", E, H, I, tensors, gate_up_order=order)


def _bytes(g: torch.Generator, shape: tuple[int, ...], low: int, high: int) -> Tensor:
    return torch.randint(low, high, shape, generator=g, dtype=torch.uint8, device=g.device)


def routing_ids(what: str, T: int, E: int, K: int, device: str = "cpu") -> Tensor:
    """[T, K] int32. Expert E - 2 has no token, but where all have one expert."""
    ids = torch.rand(T, E, device=device).topk(K).indices.int()
    if what == "skewed":  # 80% on expert 0
        ids[torch.rand(T, K, device=device) < 0.8] = 0
    if what in ("one expert", "duplicates"):
        ids.fill_(E - 1)
    if what == "duplicates":
        ids[::2, 0] = 0
    if what == "absent":
        ids[torch.rand(T, K, device=device) < 0.5] = -1
        ids[T // 2] = -1
    if what == "out of range":
        ids[::2, 1], ids[1::3, 0] = E, -7
    return torch.where(ids == E - 2, 0, ids)


@dataclass(frozen=True)
class Sm120Case:
    """Sizes of one call."""

    T: int
    K: int
    H: int
    I: int
    E: int = 4
    what: str = "random"
    order: str = "halves"
    bias: torch.dtype | None = None  # with the clamped SwiGLU
    add: bool = False
    bound: int | None = None

    def experts(self, device: str = "cpu") -> Experts:
        experts = experts_of(self.E, self.H, self.I, self.order, self.T, device)
        return experts if self.bias is None else as_gpt_oss(experts, self.bias)


def worst(case: Sm120Case, tile: Tile, arch: Arch = HOPPER, device: str = "cpu", hidden: Tensor | None = None) -> float:
    """The largest error of a token of `outputs`; infinite where the call wrote what it may not."""
    out, want, clean = outputs(case, tile, arch, device, hidden)
    return worst_error(out, want) if clean else float("inf")


def outputs(
    case: Sm120Case, tile: Tile, arch: Arch = HOPPER, device: str = "cpu", hidden: Tensor | None = None
) -> tuple[Tensor, Tensor, bool]:
    """Run a call with a tile, in software: its output, the oracle's, and whether it wrote only what it may.

    Experts without a token have NaN for scales.
    """
    T, K, E, H = case.T, case.K, case.E, case.H
    torch.manual_seed(T)
    family = Sm120Mxfp4(tile.packed, software=True)
    experts, weights = case.experts(device), torch.rand(T, K, device=device)
    ids = routing_ids(case.what, T, E, K, device)
    if hidden is None:
        hidden = torch.randn(T, H, device=device).bfloat16()
    counted = ids.clone()
    if case.bound is not None:
        counted[case.bound :] = -1
    for e in range(E):
        if not bool((counted == e).any()):
            for name, tensor in experts.tensors.items():
                if name.endswith("scales"):
                    tensor[e] = 0xFF
    tokens = None if case.bound is None else torch.tensor(case.bound, dtype=torch.int32, device=device)
    routing = Routing.from_topk(ids, weights, E, num_tokens=tokens)
    out = torch.randn(T, H, device=device) if case.add else poisoned(T, H, dtype=BF16, device=device)
    start = out.clone()
    plan = family.plan_of(Problem.of(T, K, experts, BF16, out.dtype), arch, tile)
    buffers = []
    for buffer in family.scratch(plan):
        storage = torch.full((buffer.bytes + 256,), 0xFF, dtype=torch.uint8, device=device)  # NaN
        first = -storage.data_ptr() % 128
        buffers.append((storage, storage[first : first + buffer.bytes].view(buffer.dtype).view(buffer.shape)))
    family.launch(plan, Call(hidden, routing, experts, out, case.add), tuple(view for _, view in buffers))
    clean = all(bool((storage[-128:] == 0xFF).all()) for storage, _ in buffers)
    want = oracle(hidden, counted, weights, experts, numerics_of(family, plan.problem), start if case.add else None)
    n = T if case.bound is None else case.bound
    clean &= torch.equal(out[n:], start[n:])
    return out[:n], want[:n], clean


def packed(tile: Tile) -> Tile:
    return replace(tile, packed=True)
