"""Other implementations of the layer, one file each, measured where they can be imported.

A peer is a ttnn_moe.bench.implementations.Implementation. To add one: a file here, its class in PEERS.
"""

from __future__ import annotations

from ttnn_moe.bench.implementations import Implementation

from .flashinfer_cutlass import FlashInfer
from .sonic_moe import SonicMoe
from .torch_grouped_mm import TorchGroupedMm
from .transformers_experts import Transformers
from .triton_kernels_matmul import TritonKernels
from .triton_kernels_mxfp4 import TritonKernelsMxfp4
from .vllm_fused_experts import Vllm
from .vllm_marlin_mxfp4 import VllmMarlinMxfp4
from .vllm_triton_mxfp4 import VllmTritonMxfp4

PEERS: list[Implementation] = [
    TorchGroupedMm(),
    Transformers("grouped_mm"),
    Transformers("batched_mm"),
    Transformers("eager"),
    Vllm(),
    FlashInfer(),
    SonicMoe(),
    TritonKernels(),
]

MXFP4_PEERS: list[Implementation] = [VllmMarlinMxfp4(), VllmTritonMxfp4(), TritonKernelsMxfp4()]
"""Those of MXFP4 weights."""
