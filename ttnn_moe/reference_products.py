"""Products of rows with the weights of one expert, for each weight format that the CPU backend runs."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .contract import Experts
from .formats.int4_24 import Decoder

# weights decoded at a time: 2 MB of fp32 stay in the L2 cache until they are multiplied
BLOCK_WEIGHTS = 1 << 19


class Products(Protocol):
    """The weights of one layer, as factors.

    Attributes:
        gate_up_dtype: dtype of a product with gate and up weights, before SiLU.
    """

    gate_up_dtype: torch.dtype

    def multiply(self, x: Tensor, name: str, e: int, out: Tensor, rows: slice | None = None) -> None:
        """out [n, N] = x [n, M] times the transpose of a weight of expert e.

        Args:
            name: "gate_up" [2I, H], its rows as they are stored, or "down" [H, I].
            rows: of the weight; default: all.
        """


class DenseProducts:
    """Products in the dtype of the weights, which are read in place."""

    def __init__(self, experts: Experts, rows: int, dtype: torch.dtype):
        self.gate_up_dtype = dtype
        self._weights = {name: tensor.mT for name, tensor in experts.tensors.items()}

    def multiply(self, x: Tensor, name: str, e: int, out: Tensor, rows: slice | None = None) -> None:
        weight = self._weights[name][e]
        if rows is not None:
            weight = weight[:, rows]
        if x.dtype == torch.float32 and 2 <= len(x) <= 4:
            # MKL reads a weight on the right at half its speed for so few rows
            out.copy_(torch.mm(weight.t(), x.t()).t())
        else:
            torch.mm(x, weight, out=out)


class Int4_24Products:
    """fp32 products with exact weights, decoded a block of rows at a time; out rounds them once, to its dtype.

    It owns its scratch: one call at a time, of up to `rows` rows.
    """

    gate_up_dtype = torch.float32

    def __init__(self, experts: Experts, rows: int, dtype: torch.dtype):
        self._words = {"gate_up": experts.tensors["w13"], "down": experts.tensors["w2"]}
        most = {name: min(words.shape[2], _block(words)) for name, words in self._words.items()}
        self._decoder = Decoder(max(most[name] * 2 * words.shape[1] for name, words in self._words.items()))
        self._x = torch.empty(rows * max(experts.H, experts.I), dtype=torch.float32)
        self._product = torch.empty(rows * max(most.values()), dtype=torch.float32)

    def multiply(self, x: Tensor, name: str, e: int, out: Tensor, rows: slice | None = None) -> None:
        words = self._words[name][e].transpose(0, 1)  # [R, G2, 2]
        if rows is not None:
            words = words[rows]
        if x.dtype != torch.float32:
            x = self._x[: x.numel()].view(x.shape).copy_(x)
        block = _block(self._words[name])
        for start in range(0, len(words), block):
            weight = self._decoder.decode(words[start : start + block])
            product = self._product[: len(x) * len(weight)].view(len(x), len(weight))
            out[:, start : start + block] = torch.mm(x, weight.t(), out=product)


def _block(words: Tensor) -> int:
    """Rows to decode at a time."""
    return max(1, BLOCK_WEIGHTS // (64 * words.shape[1]))


PRODUCTS: dict[str, type[DenseProducts] | type[Int4_24Products]] = {"dense": DenseProducts, "int4_24": Int4_24Products}
"""By weight format: experts, the most rows of a product, dtype of hidden."""


def products_of(experts: Experts, rows: int, dtype: torch.dtype) -> Products:
    """Products with these weights: of up to `rows` rows, of rows of that dtype."""
    return PRODUCTS[experts.format](experts, rows, dtype)
