"""Products of rows with the weights of one expert, for each weight format that the CPU backend runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from . import cpu_products
from .contract import Experts
from .cpu_products import BLOCK_WEIGHTS
from .formats import int4_24, mxfp4, mxfp4_boxes


class Products(Protocol):
    """The weights of one layer, as factors.

    Attributes:
        gate_up_dtype: dtype of a product with gate and up weights, before SiLU.
    """

    gate_up_dtype: torch.dtype

    def multiply(self, x: Tensor, name: str, e: int, out: Tensor, rows: slice | None = None) -> None:
        """out [n, N] = x [n, M] times the transpose of a weight of expert e, plus its bias if it has one.

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
        if cpu_products.widens(x.dtype, len(x)):
            cpu_products.multiply(x, weight.t(), out)
        elif x.dtype == torch.float32 and 2 <= len(x) <= 4:
            # MKL reads a weight on the right at half its speed for so few rows
            out.copy_(torch.mm(weight.t(), x.t()).t())
        else:
            torch.mm(x, weight, out=out)


class DecodedProducts(ABC):
    """fp32 products with exact weights, decoded a block of rows at a time; out rounds them once, to its dtype.

    It owns its scratch: one call at a time, of up to `rows` rows. A subclass decodes its format.
    """

    gate_up_dtype = torch.float32

    def __init__(self, experts: Experts, rows: int, dtype: torch.dtype):
        self._tensors = experts.tensors
        # rows of a weight, and those decoded at a time
        self._rows = {"gate_up": 2 * experts.I, "down": experts.H}
        self._block = {
            name: max(1, min(self._rows[name], BLOCK_WEIGHTS // K))
            for name, K in (("gate_up", experts.H), ("down", experts.I))
        }
        self._most = max(self._block["gate_up"] * experts.H, self._block["down"] * experts.I)
        self._x = torch.empty(rows * max(experts.H, experts.I), dtype=torch.float32, device="cpu")
        self._product = torch.empty(rows * max(self._block.values()), dtype=torch.float32, device="cpu")

    @abstractmethod
    def decode(self, name: str, e: int, rows: slice) -> Tensor:
        """Rows of a weight [n, K] fp32, up to a block of them, until the next call."""

    def multiply(self, x: Tensor, name: str, e: int, out: Tensor, rows: slice | None = None) -> None:
        if x.dtype != torch.float32:
            x = self._x[: x.numel()].view(x.shape).copy_(x)
        wanted = range(self._rows[name])[slice(None) if rows is None else rows]
        for start in range(0, len(wanted), self._block[name]):
            some = wanted[start : start + self._block[name]]
            weight = self.decode(name, e, slice(some.start, some.stop, some.step))
            product = self._product[: len(x) * len(weight)].view(len(x), len(weight))
            torch.mm(x, weight.t(), out=product)
            if (biases := self._tensors.get(f"{name}_bias")) is not None:
                product += biases[e, some.start : some.stop : some.step]
            out[:, start : start + len(weight)] = product


class Int4_24Products(DecodedProducts):
    """See DecodedProducts."""

    def __init__(self, experts: Experts, rows: int, dtype: torch.dtype):
        super().__init__(experts, rows, dtype)
        self._decoder = int4_24.Decoder(self._most // int4_24.GROUP)

    def decode(self, name: str, e: int, rows: slice) -> Tensor:
        words = self._tensors["w13" if name == "gate_up" else "w2"][e]  # [G2, R, 2]
        return self._decoder.decode(words[:, rows].transpose(0, 1))


class Mxfp4Products(DecodedProducts):
    """See DecodedProducts."""

    def __init__(self, experts: Experts, rows: int, dtype: torch.dtype):
        super().__init__(experts, rows, dtype)
        self._decoder = mxfp4.Decoder(self._most)

    def decode(self, name: str, e: int, rows: slice) -> Tensor:
        blocks, scales = self._tensors[f"{name}_blocks"], self._tensors[f"{name}_scales"]
        return self._decoder.decode(blocks[e, rows], scales[e, rows])


class Mxfp4BoxesProducts(Mxfp4Products):
    """See DecodedProducts. A matrix is brought back to the order of mxfp4 when its first rows are decoded."""

    def __init__(self, experts: Experts, rows: int, dtype: torch.dtype):
        super().__init__(experts, rows, dtype)
        self._order = experts.gate_up_order
        self._restored: tuple[tuple[str, int], Tensor, Tensor] | None = None

    def decode(self, name: str, e: int, rows: slice) -> Tensor:
        if self._restored is None or self._restored[0] != (name, e):
            blocks, scales = self._tensors[f"{name}_blocks"][e].clone(), self._tensors[f"{name}_scales"][e].clone()
            order = self._order if name == "gate_up" else None
            self._restored = (name, e), *mxfp4_boxes.restore_matrix(blocks, scales, order)
        _, blocks, scales = self._restored
        return self._decoder.decode(blocks[rows], scales[rows])


PRODUCTS: dict[str, type[DenseProducts] | type[DecodedProducts]] = {
    "dense": DenseProducts,
    int4_24.NAME: Int4_24Products,
    mxfp4.NAME: Mxfp4Products,
    mxfp4_boxes.NAME: Mxfp4BoxesProducts,
}
"""By weight format: experts, the most rows of a product, dtype of hidden."""


def products_of(experts: Experts, rows: int, dtype: torch.dtype) -> Products:
    """Products with these weights: of up to `rows` rows, of rows of that dtype."""
    return PRODUCTS[experts.format](experts, rows, dtype)
