"""Writing the tiny model as a Hugging Face checkpoint: sharded safetensors with one tensor per expert."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import typer
from safetensors.torch import save
from tokenizers import Tokenizer
from torch import Tensor

from ttnn_moe.accelerator import NO_DEVICE
from ttnn_moe.whole_file import whole_file

from . import tokenizer as tokenizers_files
from .network import CONFIG, GENERATION_CONFIG

SHARD_BYTES = 2_500_000
ONE_FILE = "model.safetensors"
FUSED = ("gate_up_proj", "down_proj")


def on_disk(state: Mapping[str, Tensor], experts: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """A transformers state dict under the names and in the dtype (bf16) of Qwen's own files.

    gate_up_proj [E, 2I, H] and down_proj [E, H, I] become gate_proj and up_proj [I, H], down_proj [H, I] per expert;
    the tied head is left out. experts: the dtype of these three.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        prefix, _, last = name.rpartition(".")
        value = value.detach().to("cpu", experts if last in FUSED else torch.bfloat16)
        if name == "lm_head.weight":
            continue
        if last == FUSED[0]:
            for e, both in enumerate(value):
                gate, up = both.chunk(2)
                tensors[f"{prefix}.{e}.gate_proj.weight"] = gate.contiguous()
                tensors[f"{prefix}.{e}.up_proj.weight"] = up.contiguous()
        elif last == FUSED[1]:
            for e, down in enumerate(value):
                tensors[f"{prefix}.{e}.down_proj.weight"] = down.contiguous()
        else:
            tensors[name] = value.contiguous()
    return tensors


def shards(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """The files of the weights by name: at least two shards and their index."""
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in tensors.items():
        if groups[-1] and size + value.nbytes > SHARD_BYTES:
            groups.append({})
            size = 0
        groups[-1][name] = value
        size += value.nbytes
    out: dict[str, bytes] = {}
    where: dict[str, str] = {}
    for i, group in enumerate(groups, start=1):
        file = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        out[file] = save(group, metadata={"format": "pt"})
        where.update(dict.fromkeys(group, file))
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    out["model.safetensors.index.json"] = _json(index)
    return out


def check_place(out: Path, empty: bool = False) -> None:
    """Check before a training that its --out can become a directory of this user's; nothing is made.

    Args:
        empty: it may hold no files yet.

    Raises:
        typer.BadParameter: it cannot.
    """
    near = next(path for path in (out, *out.absolute().parents) if path.exists())
    wrong = None
    if not near.is_dir():
        wrong = f"{near} is a file; give a directory"
    elif not os.access(near, os.W_OK | os.X_OK):
        wrong = f"this user cannot write to {near}; give another directory"
    elif empty and out.is_dir() and any(out.iterdir()):
        wrong = f"{out} holds files; give a directory that is empty, or none yet"
    elif (out / ONE_FILE).exists():  # loaders would read it instead of the new shards
        wrong = f"{out} holds {ONE_FILE}, the weights of another model; give another directory"
    if wrong is not None:
        raise typer.BadParameter(wrong, param_hint="--out")


def check_device(device: str) -> None:
    """Check before a training that its --device is here. Raises typer.BadParameter."""
    try:
        torch.empty(0, device=device)
    except NO_DEVICE as error:
        reason = str(error).partition("\n")[0]
        raise typer.BadParameter(f"no {device!r} is here: {reason}; use cpu", param_hint="--device") from None


def write(
    directory: Path, state: Mapping[str, Tensor], tokenizer: Tokenizer, experts: torch.dtype = torch.bfloat16
) -> None:
    """Write the checkpoint into `directory`, each file whole or not at all, the index of the weights last."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": _json(CONFIG),
        "generation_config.json": _json(GENERATION_CONFIG),
        **tokenizers_files.files(tokenizer, CONFIG["max_position_embeddings"]),
        **shards(on_disk(state, experts)),
    }
    for name, content in files.items():
        with whole_file(directory / name) as part:
            part.write_bytes(content)


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
