"""Qwen3-MoE with every tensor on a Tenstorrent chip or 1xD mesh: ttnn's own operators around our MoE layer."""

from .model import Qwen3MoeTT, load_model

__all__ = ["Qwen3MoeTT", "load_model"]
