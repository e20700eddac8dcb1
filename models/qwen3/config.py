"""Qwen3-MoE configuration: what config.json and generation_config.json of a checkpoint say, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ttnn_moe.errors import CheckpointError, RequestError
from ttnn_moe.visible import shown

from .files import Fields, is_file, path_of, reading
from .weight_formats import FORMATS, UNFINISHED, format_named

MODEL_TYPE = "qwen3_moe"
ARCHITECTURE = "Qwen3MoeForCausalLM"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

MOST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 17,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "max_position_embeddings": 1 << 21,
    "decoder_sparse_step": 1 << 10,
    "num_experts": 1 << 14,
    "num_experts_per_tok": 1 << 14,
    "moe_intermediate_size": 1 << 18,
    "intermediate_size": 1 << 20,
}
"""Largest value of each size. Far above every published model, it keeps loops and tables short."""
_MAY_BE_ZERO = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size")
_MOST_IDS = 1 << 12
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
_SIZES = tuple(name for name in _NEEDED if name != "rms_norm_eps")


@dataclass(frozen=True)
class Qwen3MoeConfig:
    """Sizes and switches of one Qwen3-MoE model; field names are those of config.json.

    H = hidden_size, I = moe_intermediate_size, E = num_experts, K = num_experts_per_tok.
    weight_format names the format of the experts, in `weight_formats.FORMATS`; config.json says it in
    quantization_config.

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
    weight_format: str = "dense"

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            value, least = getattr(self, name), 0 if name in _MAY_BE_ZERO else 1
            if type(value) is not int or not least <= value <= most:
                raise CheckpointError(
                    f"{name} is out of range", got=shown(value), expected=f"an integer from {least} to {most}"
                )
        for name, most in (("mlp_only_layers", MOST["num_hidden_layers"]), ("eos_token_ids", _MOST_IDS)):
            if (n := len(getattr(self, name))) > most:
                raise CheckpointError(f"{name} is too long", got=f"{n} items", expected=f"at most {most}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                "query heads cannot share the key/value heads evenly",
                got=f"{self.num_attention_heads} query heads, {self.num_key_value_heads} key/value heads",
                expected="num_attention_heads divisible by num_key_value_heads",
            )
        if self.head_dim % 2:
            raise CheckpointError("head_dim does not fit RoPE", got=self.head_dim, expected="an even number")
        sparse = [i for i in range(self.num_hidden_layers) if self.is_sparse(i)]
        if sparse and not (self.moe_intermediate_size >= 1 and 1 <= self.num_experts_per_tok <= self.num_experts):
            raise CheckpointError(
                "expert sizes do not fit together",
                got=f"num_experts={self.num_experts}, num_experts_per_tok={self.num_experts_per_tok}, "
                f"moe_intermediate_size={self.moe_intermediate_size}",
                expected="1 <= num_experts_per_tok <= num_experts and moe_intermediate_size >= 1",
            )
        reason = FORMATS[self.weight_format].why_not(self.num_experts, self.hidden_size, self.moe_intermediate_size)
        if sparse and reason is not None:
            raise CheckpointError(f"the experts' sizes do not fit {self.weight_format}", got=reason)
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
        directory = path_of(directory)
        with reading(directory):
            if not directory.is_dir():
                raise CheckpointError(
                    f"{directory} is not a model directory",
                    got="a file" if directory.exists() else "nothing at that path",
                    expected="a directory with config.json and *.safetensors",
                    remedy="hf download OWNER/NAME --local-dir DIR gets one from Hugging Face; give DIR",
                )
            path = directory / "config.json"
            there = is_file(path)
            if not there and (directory / UNFINISHED).is_file():
                raise CheckpointError(
                    f"{directory} is not a checkpoint: its conversion is unfinished",
                    remedy="run the same command of ttnn-moe quantize again",
                )
            if not there:
                raise CheckpointError(
                    f"{directory} is not a checkpoint: it has no config.json",
                    expected="a Hugging Face model directory",
                    remedy="give the directory that holds config.json and the *.safetensors files",
                )
            fields = Fields.of_file(path)
            eos = fields.ids("eos_token_id")
            generation = directory / "generation_config.json"
            if is_file(generation):
                eos += Fields.of_file(generation).ids("eos_token_id")
            with reading(path):
                return cls.from_dict({**fields.values, "eos_token_id": eos}, source=str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "config") -> Qwen3MoeConfig:
        """From the contents of config.json, as transformers 4 or 5 writes it.

        Raises:
            CheckpointError: another architecture, a missing field, a size out of range (see MOST), or a feature not
                computed here.
        """
        fields = Fields(values, source)
        _refuse_other_models(fields)
        rope = _rope(fields)
        missing = [name for name in _NEEDED if values.get(name) is None]
        # transformers 5 writes num_local_experts
        experts = {values[name] for name in ("num_experts", "num_local_experts") if _is_integer(values.get(name))}
        if len(experts) > 1:
            raise CheckpointError(
                f"num_experts and num_local_experts of {source} differ", got=sorted(experts), expected="one number"
            )
        E = "num_local_experts" if values.get("num_experts") is None else "num_experts"
        if values.get(E) is None:
            missing.append("num_experts")
        if rope.values.get("rope_theta") is None:
            missing.append("rope_theta")
        if missing:
            raise CheckpointError(
                f"{source} lacks needed fields",
                got=f"no {', '.join(missing)}",
                remedy="take config.json from where the checkpoint comes from",
            )
        sizes = {name: fields.integer(name) for name in _SIZES}
        head_dim = sizes["hidden_size"] // max(1, sizes["num_attention_heads"])
        dense_layers = fields.items("mlp_only_layers")
        if not all(map(_is_integer, dense_layers)):
            raise fields.wrong("mlp_only_layers", dense_layers, "a list of layers' numbers")
        try:
            return cls(
                **sizes,
                head_dim=fields.integer("head_dim", head_dim),
                num_experts=fields.integer(E),
                intermediate_size=fields.integer("intermediate_size", 0),
                decoder_sparse_step=fields.integer("decoder_sparse_step", 1),
                mlp_only_layers=tuple(dense_layers),
                rope_theta=rope.number("rope_theta", 1, 1e12),
                rms_norm_eps=fields.number("rms_norm_eps", 1e-30, 1),
                norm_topk_prob=fields.flag("norm_topk_prob"),
                attention_bias=fields.flag("attention_bias"),
                tie_word_embeddings=fields.flag("tie_word_embeddings"),
                eos_token_ids=tuple(dict.fromkeys(fields.ids("eos_token_id"))),
                dtype=_dtype(fields),
                weight_format=format_named(fields),
            )
        except CheckpointError as error:
            if source in error.what:
                raise
            what = f"{source}: {error.what}"
            raise CheckpointError(what, got=error.got, expected=error.expected, remedy=error.remedy) from None


def _is_integer(value: object) -> bool:
    return type(value) is int


def _refuse_other_models(fields: Fields) -> None:
    values, source = fields.values, fields.source
    architectures = fields.items("architectures")
    if values.get("model_type") != MODEL_TYPE or (architectures and ARCHITECTURE not in architectures):
        raise CheckpointError(
            f"{source} describes another architecture",
            got=f"model_type {shown(values.get('model_type'))}, architectures {shown(architectures)}",
            expected=f"model_type {MODEL_TYPE!r} ({ARCHITECTURE})",
            remedy="give a Qwen3-MoE checkpoint",
        )
    if values.get("hidden_act", "silu") != "silu":
        got = shown(values["hidden_act"])
        raise CheckpointError(f"hidden_act of {source} is another activation", got=got, expected="silu")
    if values.get("is_causal", True) is not True:
        got = shown(values["is_causal"])
        raise CheckpointError(f"is_causal of {source} asks for attention to later tokens", got=got, expected="true")
    # transformers: a window without a size has 4096 tokens, one of size null has no bound
    window = values.get("sliding_window", 4096)
    if fields.flag("use_sliding_window") and window is not None:
        raise CheckpointError(
            f"use_sliding_window of {source} asks for sliding-window attention, which this model does not compute",
            got=f"sliding_window {shown(window)}" + ("" if "sliding_window" in values else ", transformers' default"),
            expected="use_sliding_window false, or sliding_window null",
        )


def _rope(fields: Fields) -> Fields:
    """The object that holds rope_theta: the top level (transformers 4) or rope_parameters (5). Default RoPE only."""
    given = [rope for key in ("rope_parameters", "rope_scaling") if (rope := fields.fields(key)).values]
    for rope in given:
        kind = rope.values.get("rope_type", rope.values.get("type", "default"))
        if kind != "default" or rope.values.get("partial_rotary_factor", 1.0) != 1.0:
            raise CheckpointError(
                f"{rope.source} asks for a RoPE variant that this model does not compute",
                got=shown(rope.values),
                expected="rope_type 'default' over the whole head",
                remedy="remove the scaling; the context is then max_position_embeddings",
            )
    if len(given) == 2:
        raise CheckpointError(
            f"{fields.source} describes RoPE twice", got="rope_parameters and rope_scaling", expected="one of them"
        )
    return given[0] if given and given[0].values.get("rope_theta") is not None else fields


def _dtype(fields: Fields) -> torch.dtype | None:
    """None: the config names none. transformers 4 writes torch_dtype."""
    for name in ("dtype", "torch_dtype"):
        if (value := fields.values.get(name)) is not None:
            named = DTYPES.get(fields.text(name).removeprefix("torch."))
            if named is None:
                raise fields.wrong(name, value, f"one of {', '.join(DTYPES)}")
            return named
    return None


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
    with reading(Path(name)):
        if not Path(name).is_dir():
            raise RequestError("no such config", got=shown(name), expected=f"one of {sorted(PRESETS)}, or a directory")
    return Qwen3MoeConfig.from_directory(name)
