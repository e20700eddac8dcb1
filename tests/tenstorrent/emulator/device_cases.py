"""Programs with inputs that run both in the emulator and on ttsim, for comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from programs import block, grid, matmul, pairs, spread, tilize, unary

from ttnn_moe.tenstorrent.emulator import ComputeConfig, Program

Value = tuple[torch.Tensor, str, bool]  # values, dtype on the device, tiled


@dataclass(frozen=True)
class Case:
    """A program, its inputs, its output (shape, dtype, tiled), and how far apart two runs may be.

    exact: bit for bit. Otherwise `bound` is the norm of the difference over the norm of the values.
    """

    program: Callable[[], Program]
    inputs: Callable[[], dict[str, Value]]
    out: tuple[tuple[int, ...], str, bool]
    exact: bool = False
    bound: float = 0.0
    chips: tuple[str, ...] = ("p150", "n150")


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def one(values: torch.Tensor, dtype: str = "bfloat16", tiled: bool = True) -> dict[str, Value]:
    return {"a": (values, dtype, tiled)}


def two(m: int, k: int, n: int, dtype: str = "bfloat16") -> dict[str, Value]:
    return {
        "a": (numbers(32 * m, 32 * k), "bfloat16", True),
        "b": (numbers(32 * k, 32 * n, seed=1) * (32 * k) ** -0.5, dtype, True),
    }


FP32 = ComputeConfig(fp32_dest_acc=True)
BF16_STEP = 2.0**-8

CASES = {
    "copy": Case(
        lambda: unary(15, grid(2, 2)), lambda: one(numbers(96, 160)), ((96, 160), "bfloat16", True), exact=True
    ),
    "copy-bf16-to-fp32": Case(
        lambda: unary(4, grid(2), out_fmt="float32"),
        lambda: one(numbers(64, 64)),
        ((64, 64), "float32", True),
        exact=True,
    ),
    "copy-bfp8": Case(
        lambda: unary(4, grid(2), fmt="bfloat8_b"),
        lambda: one(numbers(64, 64), "bfloat8_b"),
        ((64, 64), "bfloat16", True),
        exact=True,
    ),
    "silu": Case(
        lambda: unary(4, grid(2), silu=True),
        lambda: one(numbers(64, 64) * 4),
        ((64, 64), "bfloat16", True),
        bound=BF16_STEP,
    ),
    "silu-fp32": Case(
        lambda: unary(4, grid(2), silu=True, config=FP32),
        lambda: one(numbers(64, 64) * 4),
        ((64, 64), "bfloat16", True),
        bound=BF16_STEP,
        chips=("p150",),
    ),
    "matmul": Case(
        lambda: matmul(2, 5, 3, grid(2, 2), ComputeConfig()),
        lambda: two(2, 5, 3),
        ((64, 96), "bfloat16", True),
        exact=True,
    ),
    "matmul-fp32": Case(
        lambda: matmul(2, 5, 3, grid(2, 2), FP32),
        lambda: two(2, 5, 3),
        ((64, 96), "bfloat16", True),
        exact=True,
        chips=("p150",),
    ),
    "matmul-long": Case(
        lambda: matmul(1, 24, 2, grid(2), ComputeConfig()),
        lambda: two(1, 24, 2),
        ((32, 64), "bfloat16", True),
        exact=True,
    ),
    "matmul-hifi2": Case(
        lambda: matmul(2, 5, 3, grid(2), ComputeConfig("HiFi2")),
        lambda: two(2, 5, 3),
        ((64, 96), "bfloat16", True),
        exact=True,
    ),
    "matmul-lofi": Case(
        lambda: matmul(2, 5, 3, grid(2), ComputeConfig("LoFi")),
        lambda: two(2, 5, 3),
        ((64, 96), "bfloat16", True),
        exact=True,
    ),
    "matmul-bfp8": Case(
        lambda: matmul(2, 5, 3, grid(2), ComputeConfig(), b_fmt="bfloat8_b"),
        lambda: two(2, 5, 3, "bfloat8_b"),
        ((64, 96), "bfloat16", True),
        exact=True,
    ),
    "block": Case(
        lambda: block(2, 3, 2, ComputeConfig()), lambda: two(2, 3, 2), ((64, 64), "bfloat16", True), exact=True
    ),
    "add": Case(
        lambda: pairs(2, grid(1), 0, 0),
        lambda: two(2, 1, 1) | two(1, 2, 1) | {"a": (numbers(64, 32), "bfloat16", True)},
        ((64, 32), "bfloat16", True),
        exact=True,
    ),
    "sub": Case(
        lambda: pairs(2, grid(1), 0, 1),
        lambda: two(1, 2, 1) | one(numbers(64, 32)),
        ((64, 32), "bfloat16", True),
        exact=True,
    ),
    "mul": Case(
        lambda: pairs(2, grid(1), 0, 2),
        lambda: two(1, 2, 1) | one(numbers(64, 32)),
        ((64, 32), "bfloat16", True),
        exact=True,
    ),
    "tilize": Case(
        lambda: tilize(3, 4, grid(2)),
        lambda: one(numbers(96, 128), tiled=False),
        ((96, 128), "bfloat16", True),
        exact=True,
    ),
    "untilize": Case(
        lambda: tilize(3, 4, grid(2), back=True),
        lambda: one(numbers(96, 128)),
        ((96, 128), "bfloat16", False),
        exact=True,
    ),
    "spread": Case(lambda: spread(6, 3, 2), lambda: one(numbers(64, 96)), ((384, 96), "bfloat16", True), exact=True),
    "spread-noc-1": Case(
        lambda: spread(6, 3, 2, "writer"), lambda: one(numbers(64, 96)), ((384, 96), "bfloat16", True), exact=True
    ),
}
