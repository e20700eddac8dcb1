"""The operator inside vLLM: a plug-in that vLLM finds by its entry point, in every process.

    pip install '.[vllm]'       # in a checkout of ttnn-moe
    vllm serve Qwen/Qwen3-30B-A3B

vLLM calls `register`. No failure here keeps vLLM from starting: what cannot be served stays with vLLM, and one line of
vLLM's log says why.
"""

from __future__ import annotations

from .plug import register

__all__ = ["register"]
