"""Qwen3-MoE configuration: what config.json and generation_config.json of a checkpoint say, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ttnn_moe.errors import CheckpointError, RequestError

MODEL_TYPE = "qwen3_moe"
ARCHITECTURE = "Qwen3MoeForCausalLM"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "decoder_sparse_step",
)
_NEEDED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "moe_intermediate_size",
    "num_experts_per_tok",
)


@dataclass(frozen=True)
class Qwen3MoeConfig:
    """Sizes and switches of one Qwen3-MoE model; field names are those of config.json.

    H = hidden_size, I = moe_intermediate_size, E = num_experts, K = num_experts_per_tok.

    Raises:
        CheckpointError: sizes that cannot belong together.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int = 0
    norm_topk_prob: bool = True
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise CheckpointError(f"{name} must be positive", got=getattr(self, name))
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                "query heads cannot share the key/value heads evenly",
                got=f"{self.num_attention_heads} query heads, {self.num_key_value_heads} key/value heads",
                expected="num_attention_heads divisible by num_key_value_heads",
            )
        if self.head_dim % 2:
            raise CheckpointError("head_dim must be even for RoPE", got=self.head_dim)
        sparse = [i for i in range(self.num_hidden_layers) if self.is_sparse(i)]
        if sparse and not (self.moe_intermediate_size >= 1 and 1 <= self.num_experts_per_tok <= self.num_experts):
            raise CheckpointError(
                "expert sizes do not fit together",
                got=f"num_experts={self.num_experts}, num_experts_per_tok={self.num_experts_per_tok}, "
                f"moe_intermediate_size={self.moe_intermediate_size}",
                expected="1 <= num_experts_per_tok <= num_experts and moe_intermediate_size >= 1",
            )
        if len(sparse) < self.num_hidden_layers and self.intermediate_size < 1:
            raise CheckpointError(
                "dense layers need intermediate_size", got=self.intermediate_size, expected="a positive size"
            )

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer is a mixture of experts (else a dense SwiGLU)."""
        return (
            layer not in self.mlp_only_layers and self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        )

    @classmethod
    def from_directory(cls, directory: str | Path) -> Qwen3MoeConfig:
        """Read config.json, and the stop tokens of generation_config.json where there is one.

        Raises:
            CheckpointError: not a directory, no config.json, bad JSON, or a model this code does not compute.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise CheckpointError(
                f"{directory} is not a model directory",
                got="a file" if directory.exists() else "nothing at that path",
                expected="a directory with config.json and *.safetensors",
            )
        path = directory / "config.json"
        if not path.is_file():
            raise CheckpointError(
                f"{directory} is not a checkpoint: it has no config.json",
                expected="a Hugging Face model directory",
                remedy="give the directory that holds config.json and the *.safetensors files",
            )
        values = read_json(path)
        eos = _ids(values.get("eos_token_id"), path)
        generation = directory / "generation_config.json"
        if generation.is_file():
            eos += _ids(read_json(generation).get("eos_token_id"), generation)
        return cls.from_dict({**values, "eos_token_id": eos}, source=str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "config") -> Qwen3MoeConfig:
        """From the contents of config.json, as transformers 4 or 5 writes it.

        Raises:
            CheckpointError: another architecture, a missing field, or a feature not computed here.
        """
        _refuse_other_models(values, source)
        theta = _rope_theta(values, source)
        missing = [name for name in _NEEDED if values.get(name) is None]
        # transformers 5 writes num_local_experts
        experts = values.get("num_experts", values.get("num_local_experts"))
        if experts is None:
            missing.append("num_experts")
        if theta is None:
            missing.append("rope_theta")
        if missing:
            raise CheckpointError(f"{source} lacks needed fields", got=f"no {', '.join(missing)}")

        def integer(name: str, value: Any) -> int:
            if isinstance(value, bool) or not isinstance(value, int):
                raise CheckpointError(f"{name} in {source} must be an integer", got=repr(value))
            return value

        def flag(name: str) -> bool:
            value = values.get(name, False)
            if not isinstance(value, bool):
                raise CheckpointError(f"{name} in {source} must be true or false", got=repr(value))
            return value

        sizes = {name: integer(name, values[name]) for name in _NEEDED if name != "rms_norm_eps"}
        head_dim = values.get("head_dim")
        if head_dim is None:
            head_dim = sizes["hidden_size"] // max(1, sizes["num_attention_heads"])
        dense_layers = values.get("mlp_only_layers") or ()
        return cls(
            **sizes,
            head_dim=integer("head_dim", head_dim),
            num_experts=integer("num_experts", experts),
            intermediate_size=integer("intermediate_size", values.get("intermediate_size") or 0),
            decoder_sparse_step=integer("decoder_sparse_step", values.get("decoder_sparse_step", 1)),
            mlp_only_layers=tuple(integer("mlp_only_layers", i) for i in dense_layers),
            rope_theta=_number("rope_theta", theta, source),
            rms_norm_eps=_number("rms_norm_eps", values["rms_norm_eps"], source),
            norm_topk_prob=flag("norm_topk_prob"),
            attention_bias=flag("attention_bias"),
            tie_word_embeddings=flag("tie_word_embeddings"),
            eos_token_ids=tuple(dict.fromkeys(_ids(values.get("eos_token_id"), source))),
            # transformers 4 writes torch_dtype
            dtype=DTYPES.get(str(values.get("dtype", values.get("torch_dtype"))).removeprefix("torch.")),
        )


def _refuse_other_models(values: Mapping[str, Any], source: str) -> None:
    architectures = values.get("architectures")
    if values.get("model_type") != MODEL_TYPE or (architectures and ARCHITECTURE not in architectures):
        raise CheckpointError(
            f"{source} describes another architecture",
            got=f"model_type {values.get('model_type')!r}, architectures {architectures}",
            expected=f"model_type {MODEL_TYPE!r} ({ARCHITECTURE})",
            remedy="give a Qwen3-MoE checkpoint",
        )
    if values.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{source} asks for another activation", got=values["hidden_act"], expected="silu")
    if values.get("use_sliding_window") and values.get("sliding_window"):
        raise CheckpointError(
            f"{source} enables sliding-window attention, which this model does not compute",
            got=f"sliding_window {values['sliding_window']}",
            expected="use_sliding_window false",
        )
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"{source} describes a quantised checkpoint",
            got=f"quantization_config with quant_method {method!r}",
            expected="bf16, fp16 or fp32 weights",
        )


def _rope_theta(values: Mapping[str, Any], source: str) -> Any:
    """RoPE base: at the top level (transformers 4) or in rope_parameters (5). Default RoPE only."""
    theta = values.get("rope_theta")
    for key in ("rope_parameters", "rope_scaling"):
        rope = values.get(key)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise CheckpointError(f"{key} in {source} must be an object", got=repr(rope))
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise CheckpointError(
                f"{source} asks for a RoPE variant that this model does not compute",
                got=f"{key} {dict(rope)}",
                expected="rope_type 'default' over the whole head",
                remedy="remove the scaling; the context is then max_position_embeddings",
            )
        theta = rope.get("rope_theta", theta)
    return theta


def _number(name: str, value: Any, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"{name} in {source} must be a positive number", got=repr(value))
    return float(value)


def _ids(value: Any, source: str | Path) -> list[int]:
    ids = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise CheckpointError(f"eos_token_id in {source} must be an integer or a list of them", got=repr(value))
    return ids


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read", got=str(error), expected="a JSON object") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} has the wrong form", got=type(value).__name__, expected="a JSON object")
    return value


# sizes: https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
PRESETS: dict[str, Qwen3MoeConfig] = {
    "qwen3-30b-a3b": Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1e6,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        intermediate_size=6144,
        norm_topk_prob=True,
        eos_token_ids=(151645, 151643),
        dtype=torch.bfloat16,
    )
}


def config_of(name: str) -> Qwen3MoeConfig:
    """The sizes of that name, or of the checkpoint in that directory.

    Raises:
        RequestError: neither. CheckpointError: the directory's config.json cannot be used.
    """
    if name in PRESETS:
        return PRESETS[name]
    if not Path(name).is_dir():
        raise RequestError("no such config", got=repr(name), expected=f"one of {sorted(PRESETS)}, or a directory")
    return Qwen3MoeConfig.from_directory(name)
