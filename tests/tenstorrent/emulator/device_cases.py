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


def exact(
    program: Callable[[], Program],
    inputs: Callable[[], dict[str, Value]],
    shape: tuple[int, ...],
    dtype: str = "bfloat16",
    tiled: bool = True,
    **more,
) -> Case:
    return Case(program, inputs, (shape, dtype, tiled), exact=True, **more)


def product(config: ComputeConfig, columns: int = 2, rows: int = 1, b: str = "bfloat16", **more) -> Case:
    """[64, 160] by [160, 96], on a grid."""
    return exact(
        lambda: matmul(2, 5, 3, grid(columns, rows), config, b_fmt=b), lambda: two(2, 5, 3, b), (64, 96), **more
    )


def silu(config: ComputeConfig, **more) -> Case:
    inputs, out = lambda: one(numbers(64, 64) * 4), ((64, 64), "bfloat16", True)
    return Case(lambda: unary(4, grid(2), silu=True, config=config), inputs, out, bound=BF16_STEP, **more)


def eltwise(op: int) -> Case:
    return exact(lambda: pairs(2, grid(1), 0, op), lambda: two(1, 2, 1) | one(numbers(64, 32)), (64, 32))


BF16, FP32 = ComputeConfig(), ComputeConfig(fp32_dest_acc=True)
BF16_STEP = 2.0**-8

CASES = {
    "copy": exact(lambda: unary(15, grid(2, 2)), lambda: one(numbers(96, 160)), (96, 160)),
    "copy-bf16-to-fp32": exact(
        lambda: unary(4, grid(2), out_fmt="float32"), lambda: one(numbers(64, 64)), (64, 64), "float32"
    ),
    "copy-bfp8": exact(lambda: unary(4, grid(2), fmt="bfloat8_b"), lambda: one(numbers(64, 64), "bfloat8_b"), (64, 64)),
    "copy-bfp4": exact(lambda: unary(4, grid(2), fmt="bfloat4_b"), lambda: one(numbers(64, 64), "bfloat4_b"), (64, 64)),
    "silu": silu(BF16),
    "silu-fp32": silu(FP32, chips=("p150",)),
    "matmul": product(BF16, 2, 2),
    "matmul-fp32": product(FP32, 2, 2, chips=("p150",)),
    "matmul-long": exact(lambda: matmul(1, 24, 2, grid(2), BF16), lambda: two(1, 24, 2), (32, 64)),
    "matmul-hifi2": product(ComputeConfig("HiFi2")),
    "matmul-lofi": product(ComputeConfig("LoFi")),
    "matmul-bfp8": product(BF16, b="bfloat8_b"),
    "matmul-bfp4": product(ComputeConfig("LoFi"), b="bfloat4_b"),
    "block": exact(lambda: block(2, 3, 2, BF16), lambda: two(2, 3, 2), (64, 64)),
    "add": eltwise(0),
    "sub": eltwise(1),
    "mul": eltwise(2),
    "tilize": exact(lambda: tilize(3, 4, grid(2)), lambda: one(numbers(96, 128), tiled=False), (96, 128)),
    "untilize": exact(lambda: tilize(3, 4, grid(2), back=True), lambda: one(numbers(96, 128)), (96, 128), tiled=False),
    "spread": exact(lambda: spread(6, 3, 2), lambda: one(numbers(64, 96)), (384, 96)),
    "spread-noc-1": exact(lambda: spread(6, 3, 2, "writer"), lambda: one(numbers(64, 96)), (384, 96)),
}
