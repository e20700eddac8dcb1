"""The experts of a layer on ttnn tensors: router, top K, our operator.

docs/upstream.md has its place in tt-metal.
"""

from __future__ import annotations

from typing import Any

from ttnn_moe.tenstorrent import Device, DeviceRouting, moe, tensors
from ttnn_moe.tenstorrent.runtime import library

from ..config import Qwen3MoeConfig
from .cache import MAX_ROWS
from .weights import Router


class MoE:
    """The sparse MLP of a model of these sizes; every layer calls it with its own weights.

    Args:
        exact: ttnn's compute config of the router and its softmax.
    """

    def __init__(self, config: Qwen3MoeConfig, device: Device, exact: Any):
        self.K, self.normalised = config.num_experts_per_tok, config.norm_topk_prob
        self.device, self.exact = device, exact
        self._outs: dict[int, Any] = {}

    def __call__(self, x: Any, weights: Router) -> Any:
        """x [1, 1, T, H] bfloat16 in tiles, replicated over the mesh -> the same form."""
        ttnn = library()

        T, H = int(x.shape[2]), int(x.shape[3])
        hidden = row_major(x, (T, H))
        out = moe(hidden, self.route(x, weights), weights.experts, out=self._out(T, H))
        return ttnn.reshape(out, (1, 1, T, H))

    def route(self, x: Any, weights: Router) -> DeviceRouting:
        """The K experts of each token and their weights. Logits are bfloat16: ttnn.topk takes no other dtype."""
        ttnn = library()

        linear, shape = weights.linear, (int(x.shape[2]), self.K)
        logits = ttnn.linear(x, linear.weight, bias=linear.bias, compute_kernel_config=self.exact)
        if self.normalised:
            # equals a softmax over all experts, with the K largest divided by their sum
            largest, ids = ttnn.topk(logits, self.K, dim=-1)
            probabilities = self._softmax(largest)
        else:
            probabilities, ids = ttnn.topk(self._softmax(logits), self.K, dim=-1)
        # row-major before the cast: some chips cannot untilize 32-bit numbers
        return DeviceRouting(
            ttnn.typecast(row_major(ids, shape), ttnn.int32),
            ttnn.typecast(row_major(probabilities, shape), ttnn.float32),
        )

    def _out(self, T: int, H: int) -> Any:
        """Where a decode step's experts write: every layer reads it before the next writes. None: to be allocated."""
        if T > MAX_ROWS or self.device.D > 1:
            return None
        if T not in self._outs:
            self._outs[T] = tensors.empty((T, H), "bfloat16", "TILE", self.device)
        return self._outs[T]

    def _softmax(self, x: Any) -> Any:
        ttnn = library()

        return ttnn.softmax(x, dim=-1, numeric_stable=True, compute_kernel_config=self.exact)


def row_major(x: Any, shape: tuple[int, int]) -> Any:
    """x, row-major, in this shape."""
    ttnn = library()

    return ttnn.reshape(ttnn.to_layout(x, ttnn.ROW_MAJOR_LAYOUT), shape)
