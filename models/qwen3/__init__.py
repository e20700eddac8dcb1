"""Qwen3-MoE on ttnn_moe: load a Hugging Face checkpoint, compute logits, generate text."""

from pathlib import Path

from .cache import StaticCache
from .config import PRESETS, Qwen3MoeConfig
from .engine import Engine
from .generate import Generation, Stats, Token, generate, stream
from .model import Qwen3Moe
from .session import Session
from .tokenizer import Tokenizer
from .weights import load_model

TINY = Path(__file__).parent / "tiny"
"""Directory of the bundled checkpoint."""

__all__ = [
    "PRESETS",
    "TINY",
    "Engine",
    "Generation",
    "Qwen3Moe",
    "Qwen3MoeConfig",
    "Session",
    "StaticCache",
    "Stats",
    "Token",
    "Tokenizer",
    "generate",
    "load_model",
    "stream",
]
