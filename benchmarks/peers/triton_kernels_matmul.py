"""triton_kernels' ragged matrix products: gather in the first, scatter and routing weights in the second.

Its fused activation is gpt-oss' clamped one, so SiLU*mul is torch's here; the sort is torch's too, as its own starts
from router scores. Written from the public sources in triton-lang/triton; it runs only where triton_kernels.matmul can
be imported, on CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ttnn_moe.bench.implementations import Forward, Implementation, why_not_on_cuda
from ttnn_moe.bench.layer import Layer, Weights


class TritonKernels(Implementation):
    """See the module's docstring."""

    name = "triton_kernels matmul"

    def available(self, device: str) -> str | None:
        return why_not_on_cuda(device, "triton_kernels.matmul", "triton_kernels (with triton_kernels.matmul)")

    def prepare(self, layer: Layer, weights: Weights, T: int) -> Forward:
        from triton_kernels.matmul import matmul
        from triton_kernels.tensor import make_ragged_tensor_metadata

        E, K, I, H = layer.E, layer.K, layer.I, layer.H
        gate_up, down = weights.gate_up.mT, weights.down.mT
        bounds = torch.arange(E + 1, dtype=torch.int32, device=gate_up.device)

        def call(hidden: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
            experts, order = ids.flatten().sort()
            counts = torch.searchsorted(experts, bounds).diff().int()
            pairs = order.int()
            ragged = make_ragged_tensor_metadata(counts, T * K)
            both = matmul(hidden, gate_up, None, a_ragged_metadata=ragged, gather_indx=pairs // K)
            act = torch.nn.functional.silu(both[..., :I]).mul_(both[..., I:])
            out = matmul(act, down, None, a_ragged_metadata=ragged, scatter_indx=pairs, gammas=scale.flatten()[order])
            return out.view(T, K, H).sum(1)

        return call
