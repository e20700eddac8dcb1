"""The MXFP4 experts of gpt-oss checkpoints, as Experts, without a dequantised copy.

| tensor of model.layers.N.mlp.experts | shape, dtype |
|---|---|
| gate_up_proj_blocks, gate_up_proj_scales | [E, 2I, H/32, 16] and [E, 2I, H/32] uint8; gate and up rows alternate |
| gate_up_proj_bias | [E, 2I] bf16 |
| down_proj_blocks, down_proj_scales | [E, H, I/32, 16] and [E, H, I/32] uint8 |
| down_proj_bias | [E, H] bf16 |
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..activations import ALPHA, CLAMPED_SWIGLU, LIMIT
from ..arranging import at_load
from ..contract import Experts
from ..errors import CheckpointError, ContractError
from ..experts import device_here
from ..formats.mxfp4 import BIASES, TENSORS
from ..visible import said, shown, words

NAMES = {name: name.replace("down_", "down_proj_").replace("up_", "up_proj_") for name in (*TENSORS, *BIASES)}
"""A checkpoint's name of each tensor of the experts, without its prefix."""
PREFIX = "model.layers.{layer}.mlp.experts."
GATE_UP_ORDER = "interleaved"
OTHERWISE = """in transformers, load it with experts_implementation="eager" and Mxfp4Config(dequantize=True)"""
"""For a model whose packed experts the operator does not run."""


def experts_of(tensors: Mapping[str, Tensor], prefix: str = "") -> Experts:
    """Experts of a layer's six tensors, named as in the module's table after prefix; zero-copy.

    Raises:
        ContractError: no mapping, or no prefix; a tensor is not there; or as Experts.mxfp4, after the prefix.
    """
    if not isinstance(tensors, Mapping) or not isinstance(prefix, str):
        raise ContractError(
            "no tensors under a prefix",
            got=f"{shown(tensors)} and prefix {shown(prefix)}",
            expected="a mapping from names to tensors, and a prefix as str",
            remedy="experts_of(tensors), or experts_of(state_dict, PREFIX.format(layer=0))",
        )
    missing = [prefix + name for name in NAMES.values() if prefix + name not in tensors]
    if missing:
        raise ContractError("tensors of the experts are missing", got=missing, expected=[*NAMES.values()])
    given = {name: tensors[prefix + theirs] for name, theirs in NAMES.items()}
    try:
        return Experts.mxfp4(**given, activation=CLAMPED_SWIGLU, gate_up_order=GATE_UP_ORDER)
    except ContractError as error:
        what = f"{prefix or 'experts: '}{error.what}"
        raise ContractError(what, got=error.got, expected=error.expected, remedy=error.remedy) from error


def load_experts(folder: str | Path, layer: int, device: torch.device | str = "cpu") -> Experts:
    """The experts of one layer of a gpt-oss checkpoint, read from its safetensors files.

    On a Hopper GPU they are arranged (`ttnn_moe.arrange`); `ttnn_moe.restore` gives the checkpoint's bytes.

    Raises:
        CheckpointError: no such folder; the files lack a tensor, or cannot be read. ContractError: as experts_of; or
            config.json has another activation; or the device cannot be used here.
    """
    from safetensors import safe_open

    device = device_here(device)
    if device.type == "meta":
        raise ContractError("the device holds no values", got="meta", expected="a device that computes, as cuda or cpu")
    folder = _folder(folder)
    prefix = PREFIX.format(layer=layer)
    try:
        config = json.loads((folder / "config.json").read_text())
        check_activation(config.get("swiglu_alpha", ALPHA), config.get("swiglu_limit", LIMIT))
        single = folder / "model.safetensors"
        if single.is_file():  # first, as transformers chooses
            shards = dict.fromkeys((prefix + name for name in NAMES.values()), single.name)
        else:
            shards = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        place = "cpu" if device.type == "cpu" else str(device)  # safetensors knows no cpu:0
        tensors = {}
        for name in (prefix + name for name in NAMES.values()):
            with safe_open(folder / shards[name], framework="pt", device=place) as file:
                tensors[name] = file.get_tensor(name)
    except ContractError:
        raise
    except Exception as error:  # of any kind: files hold anything
        raise CheckpointError(
            f"the experts of layer {layer} cannot be read from {folder}",
            got=said(error),
            expected=f"safetensors files with {prefix}{NAMES['gate_up_blocks']} and so on",
        ) from error
    return at_load(experts_of(tensors, prefix))


def _folder(folder: str | Path) -> Path:
    """The path of a folder. Raises CheckpointError unless one is there."""
    try:
        if not isinstance(folder, str | os.PathLike):
            found = shown(folder)
        elif Path(folder).is_dir():
            return Path(folder)
        else:
            found = "a file" if Path(folder).exists() else "no such folder"
    except (OSError, TypeError, ValueError) as error:  # as of a name that is too long, or a path of bytes
        found = said(error)
    raise CheckpointError(
        f"{words(folder)} is no checkpoint",
        got=found,
        expected="the folder of a gpt-oss checkpoint: config.json and *.safetensors",
    )


def check_activation(alpha: float, limit: float) -> None:
    """Raise ContractError unless a model's clamped SwiGLU is the one of gpt-oss."""
    if (alpha, limit) != (ALPHA, LIMIT):
        raise ContractError(
            "the experts' clamped SwiGLU is another",
            got=f"alpha {alpha}, limit {limit}",
            expected=f"alpha {ALPHA}, limit {LIMIT}",
            remedy=OTHERWISE,
        )
