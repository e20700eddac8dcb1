"""The layer that is measured: its sizes, what it needs of memory, and its random weights."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..accelerator import free_memory
from ..activations import CLAMPED_SWIGLU, SILU
from ..arranging import arrange
from ..contract import Experts, Problem
from ..errors import ContractError, RequestError
from ..formats import check_sizes, get_format, int4_24, mxfp4, mxfp4_boxes


@dataclass(frozen=True)
class Layer:
    """Sizes of one MoE layer: E experts, K per token, hidden size H, expert intermediate size I.

    Attributes:
        weight_format: "dense", "int4_24", "mxfp4" or "mxfp4_boxes".
        gate_up_order, activation, biased: of the Experts. Biases, of mxfp4 alone, are bf16.
    """

    name: str
    E: int
    K: int
    H: int
    I: int
    dtype: torch.dtype = torch.bfloat16
    weight_format: str = "dense"
    gate_up_order: str = "halves"
    activation: str = SILU
    biased: bool = False

    def __post_init__(self) -> None:
        if min(self.E, self.K, self.H, self.I) < 1 or self.K > self.E:
            raise ContractError(
                "sizes of the layer are out of range",
                got=f"E={self.E}, K={self.K}, H={self.H}, I={self.I}",
                expected="all positive, K <= E",
                remedy=f"a K of 1 to {self.E}" if self.K > self.E > 0 else None,
            )
        check_sizes(get_format(self.weight_format), self.H, self.I)

    def as_gpt_oss(self, activation: str = CLAMPED_SWIGLU) -> Layer:
        """The layer with another activation, biases, and gate and up rows that alternate.

        Raises:
            ContractError: its format has no biases.
        """
        if self.weight_format not in (mxfp4.NAME, mxfp4_boxes.NAME):
            raise ContractError("no such layer", got=f"{activation} in {self.weight_format}", expected="mxfp4 weights")
        return replace(self, activation=activation, biased=True, gate_up_order="interleaved")

    @property
    def expert_bytes(self) -> int:
        """Of one expert's gate, up and down weights, scales and biases."""
        bits = {int4_24.NAME: 2.0, mxfp4.NAME: 4.25, mxfp4_boxes.NAME: 4.25}.get(
            self.weight_format, 8 * self.dtype.itemsize
        )
        return int(3 * self.H * self.I * bits) // 8 + 2 * (2 * self.I + self.H) * self.biased

    @property
    def set_bytes(self) -> int:
        """Of one weight set."""
        return self.E * self.expert_bytes

    def problem(self, T: int, device: str) -> Problem:
        """A call of T tokens."""
        sizes = T, self.E, self.K, self.H, self.I, self.dtype
        form = self.weight_format, self.gate_up_order, device, 1, self.activation, self.biased
        return Problem(*sizes, None, *form)

    def working_bytes(self, T: int, sets: int) -> int:
        """A generous estimate of what calls of T tokens need beside the weights.

        Twice the step tensors of the peer that makes most of them, since eager calls and graphs have separate pools;
        inputs and outputs; fp64 copies of an expert.
        """
        pairs = T * self.K
        steps = pairs * (4 * self.H + 4 * self.I) * self.dtype.itemsize
        ends = (2 + 8) * sets * T * self.H * self.dtype.itemsize
        return 2 * steps + ends + 2 * 8 * 3 * self.H * self.I + 2**28


# sizes of the models' config.json; the third is the layer of DeepSeek-V2-Lite and of Moonlight-16B-A3B
PRESETS = {
    "qwen3-30b-a3b": Layer("qwen3-30b-a3b", E=128, K=8, H=2048, I=768),
    "i1408": Layer("i1408", E=64, K=6, H=2048, I=1408),
    "deepseek-v3": Layer("deepseek-v3", E=256, K=8, H=7168, I=2048),
}
GPT_OSS = Layer("gpt-oss-120b", E=128, K=4, H=2880, I=2880, weight_format=mxfp4.NAME).as_gpt_oss()


@dataclass
class Weights:
    """One weight set. kept: what implementations made from it, such as another layout; it is freed with the set."""

    experts: Experts
    kept: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def gate_up(self) -> Tensor:
        """Dense [E, 2I, H], gate rows first."""
        return self.experts.tensors["gate_up"]

    @property
    def down(self) -> Tensor:
        """Dense [E, H, I]."""
        return self.experts.tensors["down"]

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """What make() returned the first time."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    @classmethod
    def random(cls, layer: Layer, device: str, seed: int) -> Weights:
        """Scaled so that every projection keeps the size of its input. Dense: normal; others: random bits.

        Raises:
            ContractError: a format without such a layer.
        """
        generator = torch.Generator(device).manual_seed(seed)
        E, H, I = layer.E, layer.H, layer.I
        if layer.weight_format == int4_24.NAME:
            w13 = _random_words((E, H // 64, 2 * I, 2), H, generator)
            w2 = _random_words((E, I // 64, H, 2), I, generator)
            return cls(Experts.int4_24(w13, w2, gate_up_order=layer.gate_up_order))
        if layer.weight_format in (mxfp4.NAME, mxfp4_boxes.NAME):
            tensors = _random_mxfp4("gate_up", (E, 2 * I, H), generator) | _random_mxfp4("down", (E, H, I), generator)
            for name, rows in (("gate_up_bias", 2 * I), ("down_bias", H)) if layer.biased else ():
                tensors[name] = torch.randn(E, rows, generator=generator, device=device).bfloat16()
            experts = Experts(mxfp4.NAME, E, H, I, tensors, layer.gate_up_order, layer.activation)
            return cls(experts if layer.weight_format == mxfp4.NAME else arrange(experts))
        if layer.weight_format != "dense":
            known = ["dense", int4_24.NAME, mxfp4.NAME, mxfp4_boxes.NAME]
            raise ContractError("no random weights of this format", got=layer.weight_format, expected=f"one of {known}")
        gate_up = torch.empty(E, 2 * I, H, dtype=layer.dtype, device=device)
        down = torch.empty(E, H, I, dtype=layer.dtype, device=device)
        for weight, fan_in in ((gate_up, H), (down, I)):
            for expert in weight:
                expert.normal_(0.0, fan_in**-0.5, generator=generator)
        return cls(Experts.dense(gate_up, down, gate_up_order=layer.gate_up_order))


def _random_mxfp4(name: str, shape: tuple[int, int, int], generator: torch.Generator) -> dict[str, Tensor]:
    """Blocks of every byte, and scales of half, once and twice a power of two, by their names."""
    E, R, fan_in = shape
    # the mean square of e2m1 numbers of random bits is 8.6, and of these scales 1.75
    exponent = 127 + round(math.log2((fan_in * 15) ** -0.5))
    parts = {"blocks": (fan_in // 2, 0, 256), "scales": (fan_in // 32, exponent - 1, exponent + 2)}
    made = {}
    for part, (last, low, high) in parts.items():
        bits = torch.empty(E, R, last, dtype=torch.uint8, device=generator.device)
        made[f"{name}_{part}"] = bits.random_(low, high, generator=generator)
    return made


def _random_words(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    """int4_24 words of every int4 and index, and scales of 1 to 2 times a power of two, of either sign."""
    # of a row: fan_in / 4 weights, whose int4 has a mean square of 21.5 and whose scale is about 1.5 powers
    exponent = 127 + round(math.log2((fan_in * 12) ** -0.5))
    bits = torch.randint(0, 1 << 48, shape, generator=generator, device=generator.device)
    scale = torch.randint(0, 1 << 7, shape, generator=generator, device=generator.device)
    scale += torch.randint(0, 2, shape, generator=generator, device=generator.device) * (1 << 15) + (exponent << 7)
    return bits + scale.to(torch.int16).long() * (1 << 48)


def fit(layer: Layer, T: int, free: int, sets: int = 4, cut_experts: bool = False) -> tuple[Layer, int]:
    """The layer and the number of weight sets that fit `free` bytes together with calls of T tokens.

    Sets are given up first, down to two; then, if allowed, experts, to a multiple of eight.

    Raises:
        RequestError: with the numbers, before any memory is taken.
    """
    for n in sorted({sets, min(sets, 2)}, reverse=True):
        if n * layer.set_bytes + layer.working_bytes(T, n) <= free:
            return layer, n
    left = free - layer.working_bytes(T, n)
    E = max(left, 0) // (n * layer.expert_bytes) // 8 * 8
    if cut_experts and E >= max(layer.K, 8):
        return replace(layer, E=E), n
    raise RequestError(
        f"E={layer.E}, H={layer.H}, I={layer.I} at T={T} does not fit the memory",
        got=f"a need of {gib(n * layer.set_bytes + layer.working_bytes(T, n))} "
        f"({n} weight sets of {gib(layer.set_bytes)}, calls {gib(layer.working_bytes(T, n))})",
        expected=f"at most {gib(free)}, what is free now",
        remedy="measure fewer experts, fewer tokens or smaller sizes",
    )


def gib(n: int) -> str:
    """Bytes in GiB, as text."""
    return f"{n / 2**30:.2f} GiB"


def free_bytes(device: torch.device | str) -> int:
    """Free memory of a device; of the CPU, what this process's container may still take. sys.maxsize: not known."""
    device = torch.device(device)
    if (there := free_memory(device)) is not None:
        return there
    free = [sys.maxsize]
    if device.type == "cpu":
        with suppress(OSError, ValueError):
            meminfo = Path("/proc/meminfo").read_text().splitlines()
            free += [int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:")]
            limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in ("max", "current"))
            if limit.strip() != "max":
                free.append(int(limit) - int(used))
    return min(free)
