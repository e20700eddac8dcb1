"""MXFP4 layers and calls: those of gpt-oss beside plain ones, and what every family of kernels is asked on them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import ttnn_moe
from assertions import assert_close
from ttnn_moe import Experts, Routing
from ttnn_moe.activations import CLAMPED_SWIGLU, SILU
from ttnn_moe.backend import Numerics
from ttnn_moe.bench.layer import Layer, Weights
from ttnn_moe.formats.mxfp4 import NAME
from ttnn_moe.selfcheck.bounds import poisoned
from ttnn_moe.selfcheck.edges import Inputs
from ttnn_moe.selfcheck.oracle import oracle

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Form:
    """What experts compute, and how their tensors lie. bias: dtype of the biases, None for none."""

    activation: str = SILU
    bias: torch.dtype | None = None
    order: str = "halves"

    def __str__(self) -> str:
        bias = "plain" if self.bias is None else f"bias_{str(self.bias)[6:]}"
        return f"{self.activation}-{bias}-{self.order}"


GPT_OSS = Form(CLAMPED_SWIGLU, BF16, "interleaved")
FORMS = (
    Form(),
    GPT_OSS,
    Form(SILU, torch.float32, "interleaved"),
    Form(CLAMPED_SWIGLU, torch.float32),
    Form(CLAMPED_SWIGLU, None, "interleaved"),
    Form(SILU, BF16),
)


@dataclass(frozen=True)
class Case:
    """A call of T tokens, K experts each, and what is odd in its ids."""

    T: int
    E: int
    K: int
    H: int
    I: int
    what: str = "random"

    def __str__(self) -> str:
        return f"T{self.T}-E{self.E}-K{self.K}-H{self.H}-I{self.I}-{self.what.replace(' ', '_')}"

    def routing(self, device: str) -> Routing:
        """ids int32. random: the K experts of a token differ; skewed: 80% of the pairs name one expert."""
        T, E, K = self.T, self.E, self.K
        g = torch.Generator().manual_seed(1000 * T + E + K)
        ids = torch.rand(T, E, generator=g).topk(K).indices.int()
        weights = torch.rand(T, K, generator=g) + 0.1
        hot, odd = E // 2, torch.rand(T, K, generator=g)
        if self.what == "skewed":
            ids[odd < 0.8] = hot
        elif self.what == "one expert":
            ids[:] = E - 1
        elif self.what == "empty experts":
            ids[ids % 3 != 0] = 0
        elif self.what == "duplicates":
            ids[:, 1:] = ids[:, :1]
            ids[1::2, -1] = hot
        elif self.what == "absent":
            ids[odd < 0.5] = -1
            ids[T // 2] = -1
        elif self.what == "none":
            ids[:] = -1
        elif self.what == "out of range":
            ids[::2, -1], ids[1::3, 0] = E, -7
        else:
            assert self.what == "random"
        return Routing.from_topk(ids.to(device), (weights / weights.sum(-1, keepdim=True)).to(device), E)


CASES = (
    Case(0, 8, 2, 64, 64),
    Case(1, 1, 1, 32, 32),
    Case(1, 8, 2, 96, 160),
    Case(1, 128, 4, 2880, 2880),
    Case(2, 8, 4, 32, 96, "duplicates"),
    Case(3, 128, 8, 2048, 768),
    Case(4, 32, 4, 2880, 2880, "absent"),
    Case(7, 16, 4, 352, 416, "out of range"),
    Case(8, 8, 4, 128, 64, "none"),
    Case(8, 128, 4, 2880, 2880),
    Case(16, 64, 8, 256, 224, "one expert"),
    Case(33, 8, 4, 128, 64, "absent"),
    Case(33, 8, 4, 96, 32, "duplicates"),
    Case(32, 128, 8, 2048, 768, "skewed"),
    Case(40, 8, 2, 160, 2880, "one expert"),
    Case(65, 32, 4, 2880, 160, "skewed"),
    Case(100, 30, 3, 288, 96, "empty experts"),
    Case(128, 32, 4, 2880, 2880, "skewed"),
    Case(300, 64, 4, 256, 192, "skewed"),
    Case(333, 8, 2, 2880, 288, "one expert"),
    Case(512, 128, 8, 2048, 768, "empty experts"),
    Case(1100, 16, 4, 192, 320),
    Case(2048, 32, 4, 320, 2880, "skewed"),
)


CALLS = [(case, form) for case in CASES for form in FORMS if case.E * case.H * case.I < 1 << 26 or form in FORMS[:2]]
"""Every form on all cases but the largest, which have two."""


def random_case(seed: int) -> tuple[Case, Form]:
    """Sizes that are multiples of 32, and any form."""
    rng = random.Random(seed)
    E = rng.choice([1, 2, 7, 32, 128, 300])
    K = rng.randint(1, min(E, 16))
    T = rng.choice([1, 2, 3, 5, 9, 16, 31, 60, 130, 333, 1500])
    H, I = (rng.choice([32 * rng.randint(1, 30), 64 * rng.randint(1, 16), 2880]) for _ in range(2))
    if E * H * I > 1 << 28:  # a second of the oracle
        E, K = 7, min(K, 7)
    words = ["random", "skewed", "one expert", "empty experts", "absent", "out of range"]
    form = Form(rng.choice([SILU, CLAMPED_SWIGLU]), rng.choice([None, BF16, torch.float32]), "halves")
    return Case(T, E, K, H, I, rng.choice(words)), replace(form, order=rng.choice(["halves", "interleaved"]))


def random_mxfp4(E: int, H: int, I: int, form: Form = Form(), device: str = "cuda", seed: int = 0) -> Experts:
    """Bytes of any value, scales that keep the size of what they multiply; biases reach both limits of the clamp."""
    layer = Layer("", E, 1, H, I, weight_format=NAME, gate_up_order=form.order)
    experts = Weights.random(layer, device, seed).experts
    if form.bias is not None:
        experts = with_biases(experts, form.bias, seed)
    return replace(experts, activation=form.activation)


def with_biases(experts: Experts, dtype: torch.dtype = BF16, seed: int = 0) -> Experts:
    """The same weights with biases: about one gate in ten is above 7, and one up in five beyond +-7."""
    g = torch.Generator(experts.device).manual_seed(seed)
    E, H, I = experts.sizes
    biases = {
        name: (torch.randn(E, rows, generator=g, device=experts.device) * size).to(dtype)
        for name, rows, size in (("gate_up_bias", 2 * I, 5.5), ("down_bias", H, 1.0))
    }
    return replace(experts, tensors={**experts.tensors, **biases})


def as_gpt_oss(experts: Experts, bias_dtype: torch.dtype = BF16, seed: int = 0) -> Experts:
    """The same weights, with biases and the clamped SwiGLU."""
    return replace(with_biases(experts, bias_dtype, seed), activation=CLAMPED_SWIGLU)


def interleaved(experts: Experts) -> Experts:
    """The same experts, with gate and up rows that alternate."""
    mixed = {
        name: torch.stack(tensor.chunk(2, 1), 2).flatten(1, 2) if name.startswith("gate_up") else tensor
        for name, tensor in experts.tensors.items()
    }
    return replace(experts, tensors=mixed, gate_up_order="interleaved")


def spoil_idle(x: Inputs) -> None:
    """NaN in everything of the experts that no token names."""
    for e in range(x.experts.E):
        if not bool((x.counted_ids == e).any()):
            spoil(x.experts, e)


def spoil(experts: Experts, e: int) -> None:
    """NaN in all scales and biases of an expert: no result may hold one if no token names it."""
    for name, tensor in experts.tensors.items():
        if not name.endswith("blocks"):
            tensor[e] = 0xFF if name.endswith("scales") else torch.nan


def near_the_ends(form: Form, high: bool, device: str = "cuda") -> tuple[Experts, Tensor]:
    """Experts whose up rows have the smallest scales (2^-127 .. 2^-124) or large ones (2^118 .. 2^121), and hidden
    [9, H] of a size that keeps activations in the range of bf16. No weight is 2^128 or more."""
    assert form.activation == SILU and form.bias is None
    experts = random_mxfp4(4, 96, 64, form, device)
    up = slice(1, None, 2) if form.order == "interleaved" else slice(experts.I, None)
    scales = experts.tensors["gate_up_scales"][:, up]
    scales.copy_(torch.randint(245, 249, scales.shape) if high else torch.randint(0, 4, scales.shape))
    return experts, torch.randn(9, 96, device=device).bfloat16() * 2.0 ** (-100 if high else 40)


def inputs_of(case: Case, form: Form, device: str = "cuda", seed: int = 0) -> tuple[Tensor, Routing, Experts]:
    """hidden [T, H] bf16, the routing, and experts; those that no token names are NaN."""
    experts, routing = random_mxfp4(case.E, case.H, case.I, form, device, seed), case.routing(device)
    for e in set(range(case.E)) - set(routing.topk_ids.flatten().tolist()):
        spoil(experts, e)
    g = torch.Generator(device).manual_seed(seed + 1)
    return torch.randn(case.T, case.H, generator=g, device=device).bfloat16(), routing, experts


def outputs(
    hidden: Tensor, routing: Routing, experts: Experts, backend: str = "cuda"
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """What a call was asked, its output, what out held before (None: nothing): ids of both kinds, bf16 and fp32."""
    T, H, E = *hidden.shape, experts.E
    for ids in (routing.topk_ids, routing.topk_ids.long()):
        given = Routing.from_topk(ids, routing.topk_weights, E)
        for dtype, start in ((BF16, None), (torch.float32, torch.randn(T, H, device=hidden.device))):
            out = poisoned(T, H, dtype=dtype, device=hidden.device) if start is None else start.clone()
            ttnn_moe.moe(hidden, given, experts, out=out, accumulate=start is not None, backend=backend)
            yield f"ids {ids.dtype}, out {dtype}", out, start


def check_case(case: Case, form: Form, numerics: Numerics, backend: str = "cuda", device: str = "cuda") -> None:
    """A call of a case is within the bound of the oracle with these roundings, in every kind of ids and output."""
    hidden, routing, experts = inputs_of(case, form, device)
    want = oracle(hidden, routing.topk_ids, routing.topk_weights, experts, numerics)
    for what, out, start in outputs(hidden, routing, experts, backend):
        assert_close(out, want if start is None else want + start, BF16, f"{case}, {form}, {what}")
