"""A Qwen3-MoE model in the sizes that ttnn_moe.tenstorrent plans with."""

from __future__ import annotations

from ttnn_moe import Placement
from ttnn_moe.errors import CheckpointError
from ttnn_moe.tenstorrent.heads import HeadShare
from ttnn_moe.tenstorrent.memory import ModelSizes

from ..config import Qwen3MoeConfig


def model_sizes(config: Qwen3MoeConfig) -> ModelSizes:
    """The sizes of a configuration.

    Raises:
        CheckpointError: experts in a format that the chips do not run.
    """
    check_format(config)
    return ModelSizes(
        H=config.hidden_size,
        E=config.num_experts,
        K=config.num_experts_per_tok,
        I=config.moe_intermediate_size,
        V=config.vocab_size,
        context=config.max_position_embeddings,
        layers=config.num_hidden_layers,
        sparse_layers=sum(config.is_sparse(i) for i in range(config.num_hidden_layers)),
        dense_I=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        attention_bias=config.attention_bias,
    )


def share_of(config: Qwen3MoeConfig, D: int) -> HeadShare:
    """The attention heads of each of D chips.

    Raises:
        ContractError: D chips cannot share them.
    """
    return HeadShare.of(config.num_attention_heads, config.num_key_value_heads, D)


def check_mesh(config: Qwen3MoeConfig, D: int, split: bool = False) -> None:
    """Raise ContractError if D chips cannot share the experts, or the attention heads.

    Args:
        split: each chip holds a part of every expert, so D need not divide their number.
    """
    if config.num_experts and not split:
        Placement.uniform(config.num_experts, D)
    share_of(config, D)


def check_format(config: Qwen3MoeConfig) -> None:
    """Raise CheckpointError for experts in a format that the chips do not run."""
    if config.weight_format != "dense":
        raise CheckpointError(
            "this model's experts have a format that backend tenstorrent does not run",
            got=config.weight_format,
            expected="dense",
            remedy="the checkpoint that it was quantised from",
        )
