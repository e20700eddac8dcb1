"""One training step of the tiny model, a CUDA graph on CUDA, and the schedules of learning rate, noise and length."""

from __future__ import annotations

import math
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batches import LENGTHS, token_weights
from .network import CONFIG, Network

WARM_UP = 0.02
WEIGHT_DECAY = 0.1
# from this part of the training on: the shares of LENGTHS. A model learns to attend to a key much sooner among few keys
CURRICULUM: tuple[tuple[float, tuple[float, ...]], ...] = (
    (0.0, (1.0,)),
    (0.05, (0.5, 0.5)),
    (0.12, (0.3, 0.3, 0.4)),
    (0.20, (0.3, 0.1, 0.2, 0.4)),
)


def row_lengths(steps: int, seed: int) -> list[int]:
    """The row length of each step."""
    rng = Random(f"lengths/{seed}")
    out = []
    for step in range(steps):
        shares = [shares for start, shares in CURRICULUM if step >= start * steps][-1]
        out.append(rng.choices(LENGTHS[: len(shares)], shares)[0])
    return out


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then half a cosine down to zero."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def noise_share(step: int, steps: int) -> float:
    """The share of the experts' noise: none while the tasks are learnt, all of it later."""
    done = step / steps
    return min(1.0, max(0.0, (done - 0.3) / 0.3))


class Stepper:
    """Runs training steps: forward, backward, clip, AdamW. Matrix products are bf16 on CUDA, weights stay fp32.

    Args:
        network: on its device already.
        compile_blocks: fuse each layer with torch.compile. Costs a minute at the start.
        graphs: capture a CUDA graph for each shape of batch.
    """

    def __init__(self, network: Network, compile_blocks: bool, graphs: bool):
        self.network, self.graphs = network, graphs
        self.device = next(network.parameters()).device
        on_cuda = self.device.type == "cuda"
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=on_cuda, cache_enabled=False)
        self.parameters: list[nn.Parameter] = list(dict.fromkeys(network.parameters()))
        self.gradients = [torch.zeros_like(parameter) for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        matrices = [p for p in self.parameters if p.dim() > 1]
        vectors = [p for p in self.parameters if p.dim() == 1]
        # a tensor, so that a captured step reads its present value
        self.rate = torch.zeros((), device=self.device)
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.rate,
            betas=(0.9, 0.98),
            fused=True,
            capturable=on_cuda,
        )
        self.loss = torch.zeros(2, device=self.device)
        if compile_blocks:
            torch._dynamo.config.recompile_limit = 64
            network.block = torch.compile(network._block, dynamic=False)
        self.captured: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def __call__(self, ids: Tensor, kinds: Tensor, rate: float, noise: float = 0.0) -> None:
        """One step on ids [B, S] int16 and kinds [B, S] uint8, both on the CPU. `loss` then holds its two losses."""
        self.rate.fill_(rate)
        self.network.expert_noise.fill_(noise)
        if not self.graphs:
            self._step(ids.to(self.device), kinds.to(self.device))
            return
        shape = tuple(ids.shape)
        if shape not in self.captured:
            self.captured[shape] = self._capture(ids, kinds)
        graph, static_ids, static_kinds = self.captured[shape]
        static_ids.copy_(ids, non_blocking=True)
        static_kinds.copy_(kinds, non_blocking=True)
        graph.replay()

    def _capture(self, ids: Tensor, kinds: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        static_ids, static_kinds = ids.to(self.device), kinds.to(self.device)
        rate = self.rate.clone()
        # warm-up steps must not train: the replay trains on this batch
        self.rate.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step(static_ids, static_kinds)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(static_ids, static_kinds)
        self.rate.copy_(rate)
        return graph, static_ids, static_kinds

    def _step(self, ids: Tensor, kinds: Tensor) -> None:
        torch._foreach_zero_(self.gradients)
        ids = ids.long()
        real = ids != CONFIG["pad_token_id"]
        with self.autocast:
            logits, balance = self.network(ids, real)
        weights = token_weights(kinds[:, 1:]).flatten()
        each = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (each * weights).sum() / weights.sum()
        (loss + CONFIG["router_aux_loss_coef"] * balance).backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.loss.copy_(torch.stack((loss.detach(), balance.detach())))
