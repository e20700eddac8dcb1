"""Safetensors files that carry a checksum of their tensors, and what made them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from .files import reading

_KEY = "ttnn_moe"  # of the metadata: one key, since the order of several is random
_PIECE_BYTES = 16 << 20


def packed(tensors: Mapping[str, Tensor], made_by: str) -> bytes:
    """The bytes of a file that holds these tensors, their checksum, and the words `made_by`."""
    digest = _checksum((name, len(tensors[name]), tensors[name]) for name in sorted(tensors))
    said = json.dumps({"conversion": made_by, "sha256": digest}, sort_keys=True)
    return save(dict(tensors), metadata={_KEY: said})


def examined(path: Path) -> tuple[str | None, bool]:
    """What made a file, or None; and whether its tensors have its checksum (True where it carries none).

    Raises:
        CheckpointError: not a whole safetensors file.
    """
    with reading(path), safe_open(path, framework="pt") as file:
        said = json.loads((file.metadata() or {}).get(_KEY, "{}"))
        if "sha256" not in said:
            return said.get("conversion"), True
        slices = ((name, file.get_slice(name)) for name in sorted(file.keys()))
        found = _checksum((name, part.get_shape()[0], part) for name, part in slices)
        return said.get("conversion"), found == said["sha256"]


def raw(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor, as a buffer."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _checksum(tensors: Iterable[tuple[str, int, Any]]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes. Each tensor, or slice of a file, comes with its number of rows."""
    digest = hashlib.sha256()
    for name, n, rows in tensors:
        first = rows[0:1]
        digest.update(f"{name} {first.dtype} {(n, *first.shape[1:])}\n".encode())
        height = max(1, _PIECE_BYTES // max(1, first.nbytes))
        for start in range(0, n, height):
            digest.update(raw(rows[start : start + height]))
    return digest.hexdigest()
