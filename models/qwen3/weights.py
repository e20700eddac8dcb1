"""Weights: from a checkpoint into the model's own tensors; or random."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from ttnn_moe import registry
from ttnn_moe.accelerator import NO_DEVICE, on_host
from ttnn_moe.arguments import FLOATS, as_integer, names_of
from ttnn_moe.contract import HIDDEN_DTYPES, Problem
from ttnn_moe.errors import CheckpointError, RequestError
from ttnn_moe.tenstorrent.runtime import is_emulator
from ttnn_moe.visible import said, shown

from .checkpoint import Checkpoint, slots
from .config import Qwen3MoeConfig
from .layers import MoE
from .model import Qwen3Moe, placed
from .pieces import Progress
from .split import WHOLE, Split

STD = 0.02
M = TypeVar("M", bound=Qwen3Moe)


def load_model(
    directory: str | Path,
    backend: str = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    progress: Progress | None = None,
) -> Qwen3Moe:
    """Load a Qwen3-MoE checkpoint in Hugging Face format (one safetensors file, or shards with an index).

    It checks everything before it takes memory. Then it copies each tensor from the file to its final place, so the
    peak stays near the size of the weights.

    Args:
        directory: holds config.json and the weights.
        backend: the ttnn_moe backend that runs the experts, or "auto".
        device: default "cuda" or "npu" where the backend, asked for or chosen, runs there, else "cpu".
        dtype: bfloat16, float16 or float32 (torch dtype or its name); default: that of the checkpoint.
        progress: called with bytes read and bytes in all.

    Raises:
        CheckpointError: not a checkpoint, another architecture, damaged files, or tensors that do not match; the
            message names every missing, unexpected and mis-shaped tensor.
            It names weights that do not fit the device's memory, too.
        BackendUnavailable: the backend cannot run here, or does not run the format of the experts.
        RequestError: no such device here.
    """
    checkpoint = Checkpoint(directory)
    return filled(checkpoint, lambda: Qwen3Moe(checkpoint.config, backend), backend, device, dtype, progress)


def filled(
    checkpoint: Checkpoint,
    make: Callable[[], M],
    backend: str,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    progress: Progress | None = None,
    split: Split = WHOLE,
) -> M:
    """The model that make() gives, with a checkpoint's weights, or the share of them that `split` says.

    Args:
        make: called on the meta device. Others, and errors: as load_model.
    """
    registry.resolve(backend)
    place, kind = device_of(device, backend), dtype_of(dtype) or checkpoint.dtype
    _check_format(split.local(checkpoint.config), backend, kind, place)
    try:
        model = placed(make, kind, place)
    except (RuntimeError, MemoryError) as error:  # torch's CPU allocator raises RuntimeError
        got = f"{checkpoint.nbytes / 2**30:.1f} GiB in the files, {said(error)}"
        raise CheckpointError(
            f"{checkpoint.directory} does not fit the memory of {place}",
            got=got,
            remedy="experts of fewer bits (ttnn-moe quantize), or several processes (--parallel)",
        ) from error
    with on_host():
        checkpoint.read(slots(model, checkpoint.fused), progress, split)
        checkpoint.check_values(model, split)
        if split.rank == 0:
            checkpoint.check_tied_head(model.embed.weight)
    return model


def _check_format(config: Qwen3MoeConfig, backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise BackendUnavailable, with reasons, if the backend does not run the format of the experts."""
    if config.weight_format != "dense" and any(map(config.is_sparse, range(config.num_hidden_layers))):
        E, K, H, I = config.num_experts, config.num_experts_per_tok, config.hidden_size, config.moe_intermediate_size
        form = config.weight_format
        registry.choose(Problem(1, E, K, H, I, dtype, weight_format=form, device=device.type), backend)


def device_of(device: torch.device | str | None, backend: str) -> torch.device:
    """The device asked for, or the one that suits the backend.

    Raises:
        RequestError: it is no device, torch does not know it, or has none here.
    """
    if device is None:
        device = {"cuda": "cuda", "ascend": "npu"}.get(registry.resolve(backend), "cpu")
    if not isinstance(device, torch.device | str):
        number = as_integer(device)
        if number is None:
            raise RequestError(
                "device is no device",
                got=f"device={shown(device)}",
                expected="a torch.device or its name, as cuda:1 or cpu, or the number of an accelerator",
                remedy="leave device out for the one that suits the backend",
            )
        device = number
    if is_emulator(str(device)):
        raise RequestError(
            "the emulator runs generate and bench-model alone, with backend tenstorrent",
            got=f"device {device} with backend {backend}",
            remedy="generate or bench-model with --backend tenstorrent; or leave device and backend out",
        )
    try:
        return torch.empty(0, device=device).device
    except NO_DEVICE as error:
        raise RequestError(f"no device {device} here", got=str(error).splitlines()[0], remedy="use cpu") from error


def check_computes(device: torch.device) -> None:
    """Raise RequestError for meta."""
    if device.type == "meta":
        raise RequestError("the device holds no values", got="meta", expected="a device that computes, as cuda or cpu")


def randomize(model: Qwen3Moe, seed: int = 0) -> None:
    """Fill the weights in place: norms with 1, biases with 0, all else from N(0, 0.02^2), or codes of that variance."""
    generator = torch.Generator(model.device).manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, MoE):
                module.format.fill(module.tensors, STD, generator)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1)
            elif name.endswith("bias"):
                parameter.zero_()
            elif parameter.is_floating_point():
                parameter.normal_(0, STD, generator=generator)


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The torch dtype of a name or a dtype; None stays None.

    Raises:
        CheckpointError: no model can be loaded in this dtype.
    """
    named = FLOATS.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and named not in FLOATS.values():
        raise CheckpointError("a model cannot be loaded in this dtype", got=dtype, expected=names_of(*HIDDEN_DTYPES))
    return named
