"""Small models for ttnn-moe quantize, and the bytes of its files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from paths import TINY
from qwen3_checkpoints import make

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 64,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
}


def made(directory: Path, dtype: torch.dtype = torch.bfloat16, shards: str = "5GB", **changes: Any) -> Path:
    make(directory, dtype, shards, **{**SIZES, **changes})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, directory)
    return directory


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}
