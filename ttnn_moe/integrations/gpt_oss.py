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
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..activations import ALPHA, CLAMPED_SWIGLU, LIMIT
from ..arranging import at_load
from ..contract import Experts
from ..errors import CheckpointError, ContractError
from ..formats.mxfp4 import BIASES, TENSORS
from ..visible import said

NAMES = {name: name.replace("down_", "down_proj_").replace("up_", "up_proj_") for name in (*TENSORS, *BIASES)}
"""A checkpoint's name of each tensor of the experts, without its prefix."""
PREFIX = "model.layers.{layer}.mlp.experts."
GATE_UP_ORDER = "interleaved"


def experts_of(tensors: Mapping[str, Tensor], prefix: str = "") -> Experts:
    """Experts of a layer's six tensors, named as in the module's table after prefix; zero-copy.

    Raises:
        ContractError: a tensor is not there; or as Experts.mxfp4, after the prefix.
    """
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

    folder = Path(folder)
    _check_device(device)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no checkpoint",
            got="a file" if folder.exists() else "no such folder",
            expected="the folder of a gpt-oss checkpoint: config.json and *.safetensors",
        )
    prefix = PREFIX.format(layer=layer)
    try:
        config = json.loads((folder / "config.json").read_text())
        check_activation(config.get("swiglu_alpha", ALPHA), config.get("swiglu_limit", LIMIT))
        index = folder / "model.safetensors.index.json"
        if index.exists():
            shards = json.loads(index.read_text())["weight_map"]
        else:
            shards = dict.fromkeys((prefix + name for name in NAMES.values()), "model.safetensors")
        tensors = {}
        for name in (prefix + name for name in NAMES.values()):
            with safe_open(folder / shards[name], framework="pt", device=str(device)) as file:
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


def _check_device(device: torch.device | str) -> None:
    """Raise ContractError unless tensors can be made on the device."""
    try:
        torch.empty(0, device=device)
    except Exception as error:  # of any kind: each device of torch has its own
        raise ContractError(
            f"the device {device} cannot be used here",
            got=str(error).partition("\n")[0],
            expected="a device of this machine",
            remedy='device="cpu"',
        ) from error


def check_activation(alpha: float, limit: float) -> None:
    """Raise ContractError unless a model's clamped SwiGLU is the one of gpt-oss."""
    if (alpha, limit) != (ALPHA, LIMIT):
        raise ContractError(
            "the experts' clamped SwiGLU is another",
            got=f"alpha {alpha}, limit {limit}",
            expected=f"alpha {ALPHA}, limit {LIMIT}",
        )
