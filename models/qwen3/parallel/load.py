"""A rank's share of a checkpoint, as a model that works together with the other ranks'."""

from __future__ import annotations

from pathlib import Path

import torch

from ttnn_moe.errors import RequestError
from ttnn_moe.parallel.layer import NAMES
from ttnn_moe.parallel.ranks import Ranks
from ttnn_moe.parallel.ranks.sums import sums_of
from ttnn_moe.visible import shown

from ..checkpoint import Checkpoint
from ..model import Qwen3Moe
from ..pieces import Progress
from ..split import Split
from ..weights import dtype_of, filled
from .experts import ExpertsQwen3
from .tensor import TensorQwen3

LOADING = 3600.0
"""Seconds that a rank may load longer than another. One that dies meanwhile misses its heartbeat."""


def check_exchange(exchange: str) -> None:
    """Raise RequestError for an unknown exchange."""
    if exchange not in NAMES:
        raise RequestError("unknown exchange", got=shown(exchange), expected=f"one of {list(NAMES)}")


def load_shared(
    directory: str | Path,
    ranks: Ranks,
    kind: str,
    backend: str = "auto",
    dtype: torch.dtype | str | None = None,
    progress: Progress | None = None,
    exchange: str = "auto",
) -> Qwen3Moe:
    """Load the share of this rank; every rank calls it. A rank reads no byte of the others' shares.

    First all ranks compare what they are about to do; see Ranks.meet.

    Args:
        kind: "experts" or "tensor"; see `split`. exchange: of experts; see ExpertParallel. Others: as load_model.

    Returns:
        ExpertsQwen3 or TensorQwen3, on the device of this rank.

    Raises:
        ContractError: a rank has another version, checkpoint, routing size, dtype or layout; it is named.
        RankStopped: a rank did not come, or failed to load.
        RequestError: so many ranks cannot share the model; or an unknown exchange, or one beside "tensor". Others: as
            load_model.
    """
    split = Split(kind, ranks.size, ranks.rank)
    check_exchange(exchange)
    if kind != "experts" and exchange != "auto":
        raise RequestError(
            "an exchange is of shared experts",
            got=f"exchange={shown(exchange)}, kind={shown(kind)}",
            expected="exchange='auto'",
            remedy="leave exchange out, or kind='experts'",
        )
    checkpoint = Checkpoint(directory)
    config = checkpoint.config
    ranks.compare(
        {
            "checkpoint": checkpoint.digest,
            "K": str(config.num_experts_per_tok),
            "E": str(config.num_experts),
            "H": str(config.hidden_size),
            "I": str(config.moe_intermediate_size),
            "format of the experts": config.weight_format,
            "dtype": str(dtype_of(dtype) or checkpoint.dtype),
            "layout": f"{kind}, {ranks.size} ranks, exchange {exchange}",
        }
    )

    # before the model is made, on the meta device
    sums = sums_of(ranks, config.hidden_size, config.vocab_size // split.D) if kind == "tensor" else None

    def make() -> Qwen3Moe:
        if sums is not None:
            return TensorQwen3(config, backend, split, sums)
        return ExpertsQwen3(config, backend, split, ranks.turns, exchange)

    model = filled(checkpoint, make, backend, ranks.device, dtype, progress, split)
    ranks.meet("loaded", LOADING)
    return model
