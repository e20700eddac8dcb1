"""A tiny gpt-oss checkpoint with MXFP4 experts, of random weights, as transformers and its authors store one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_models import COMMON, transformers
from ttnn_moe.formats.quantise_mxfp4 import quantise

E, H, I, LAYERS = 8, 64, 96, 2


def tensors_of(seed: int = 0) -> tuple[object, dict[str, Tensor]]:
    """The config, and the tensors under a checkpoint's names: experts packed, everything else bf16."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": H, "intermediate_size": I, "num_local_experts": E, "head_dim": 16}
    config = transformers.GptOssConfig(**{**COMMON, "num_hidden_layers": LAYERS, "sliding_window": 4, **sizes})
    model = transformers.GptOssForCausalLM(config)
    out = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")) and ".experts." in name:
            blocks, scales = quantise(torch.randn(tensor.mT.shape) * tensor.shape[1] ** -0.5)
            out[f"{name}_blocks"], out[f"{name}_scales"] = blocks.unflatten(-1, (-1, 16)), scales
        elif name.endswith("proj_bias"):
            # some gates and ups reach the limits of the clamp
            out[name] = (torch.randn(tensor.shape) * (5 if "gate_up" in name else 0.3)).bfloat16()
        else:
            std = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.2
            out[name] = (torch.randn(tensor.shape) * std + ("norm" in name)).bfloat16()
    return config, out


def save(folder: Path, seed: int = 0, change: dict[str, Tensor] | None = None, **config_change: object) -> Path:
    """Write config.json and model.safetensors."""
    config, tensors = tensors_of(seed)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    fields = {**config.to_dict(), "dtype": "bfloat16", "architectures": ["GptOssForCausalLM"], **config_change}
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    held = {name: tensor.contiguous() for name, tensor in (tensors | (change or {})).items()}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return folder
