"""Graphs for steps of more tokens than vLLM captures by itself.

Without a graph, a step of this package's layers waits for the host: 0.7 to 1.3 ms a layer on machines of an H200, where
the GPU needs 0.4 for 512 tokens and 1.1 for 4,096.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from . import model_gate

MORE = (*range(640, 1025, 128), *range(1280, 4097, 256))
"""Tokens. Above, the GPU works longer than most hosts."""


def of_vllm(rows: int, tokens: int) -> list[int]:
    """Tokens of the graphs that vLLM captures for so many sequences, and so many tokens of a step."""
    # 1,024 since 0.33; before, 512 everywhere
    most = min(2 * rows, 1024 if current_platform.is_device_capability_family(100) else 512)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16), tokens]
    return [size for size in sizes if size <= most]


class GraphSizes(VerifyAndUpdateConfig):
    """vLLM asks it when an engine's configuration is made, before sizes of graphs are chosen."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Add sizes where nobody chose any."""
        compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
        chosen = compilation.cudagraph_capture_sizes is not None or compilation.max_cudagraph_capture_size is not None
        if chosen or vllm_config.performance_mode != "balanced" or model_gate.why_not(vllm_config) is not None:
            return
        tokens = scheduler.max_num_batched_tokens
        sizes = {*of_vllm(scheduler.max_num_seqs, tokens), *MORE}
        compilation.cudagraph_capture_sizes = sorted(size for size in sizes if size <= tokens)
