"""Qwen3-MoE on ttnn_moe: load a Hugging Face checkpoint, compute logits, generate text."""

from pathlib import Path

from .config import PRESETS, Qwen3MoeConfig
from .model import Qwen3Moe
from .runtime.engine import Engine
from .runtime.generate import Generation, generate, stream
from .runtime.requests import Stats, Token
from .tokenizer import Tokenizer
from .weights import load_model

TINY = Path(__file__).parent / "tiny"
"""Directory of the bundled checkpoint."""
TINY_INT4_24 = Path(__file__).parent / "tiny_int4_24"
"""Directory of the bundled checkpoint with experts in int4_24, fine-tuned."""

__all__ = [
    "PRESETS",
    "TINY",
    "TINY_INT4_24",
    "Engine",
    "Generation",
    "Qwen3Moe",
    "Qwen3MoeConfig",
    "Stats",
    "Token",
    "Tokenizer",
    "generate",
    "load_model",
    "stream",
]
