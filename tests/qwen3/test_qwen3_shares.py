"""What a rank of a shared model holds: parts of experts, heads and rows, and which numbers of ranks fit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from model_ranks import by_ranks
from shared_models import Alone
from ttnn_moe.errors import ContractError, RequestError
from ttnn_moe.models.qwen3 import TINY, TINY_INT4_24, Qwen3Moe, load_model
from ttnn_moe.models.qwen3.checkpoint import Checkpoint
from ttnn_moe.models.qwen3.parallel import load_shared
from ttnn_moe.models.qwen3.parallel.experts import ExpertsQwen3
from ttnn_moe.models.qwen3.parallel.tensor import TensorQwen3
from ttnn_moe.models.qwen3.split import Split
from ttnn_moe.models.qwen3.weights import filled
from ttnn_moe.parallel.compare import compare
from ttnn_moe.parallel.ranks import Ranks
from ttnn_moe.parallel.ranks.turns import Turns


@pytest.mark.parametrize("directory", [TINY, TINY_INT4_24], ids=["dense", "int4_24"])
def test_parts_of_experts_add_up(directory: Path) -> None:
    """Each rank's I/D channels, and each rank's E/D experts, against the whole layer."""
    checkpoint, layer = Checkpoint(directory), 1
    whole = load_model(directory, device="cpu", dtype=torch.float32).layers[layer].mlp
    x = torch.randn(5, checkpoint.config.hidden_size, generator=torch.Generator().manual_seed(0))
    ids, weights = torch.randint(0, 16, (5, 2), dtype=torch.int32), torch.rand(5, 2)
    want, total = whole.add_experts(torch.zeros_like(x), ids, weights, x, None), torch.zeros_like(x)
    for rank in range(2):
        split = Split("tensor", 2, rank)
        make: Any = partial(TensorQwen3, checkpoint.config, "reference", split, Alone())
        part = filled(checkpoint, make, "reference", "cpu", torch.float32, split=split)
        total = part.layers[layer].mlp.add_experts(total, ids, weights, x, None)
        split = Split("experts", 2, rank)
        make = partial(ExpertsQwen3, checkpoint.config, "reference", split, Turns(None, None, 1.0))
        part = filled(checkpoint, make, "reference", "cpu", torch.float32, split=split)
        for name, tensor in part.layers[layer].mlp.tensors.items():
            assert torch.equal(tensor, whole.tensors[name][8 * rank : 8 * (rank + 1)])
    torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-5)


def test_a_part_of_fused_rows_is_gate_then_up() -> None:
    gate, up = torch.arange(4 * 8 * 3).view(4, 8, 3).chunk(2, 1)
    for rank in range(2):
        here = torch.full((4, 4, 3), -1)
        for there, own in Split("tensor", 2, rank).regions("l.mlp.experts.gate_up_proj", (4, 8, 3), (4, 4, 3)):
            here[own] = torch.cat((gate, up), 1)[there]
        assert torch.equal(here, torch.cat((gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]), 1))


def other_checkpoint(ranks: Ranks) -> Qwen3Moe:
    return load_shared(TINY_INT4_24 if ranks.rank == 2 else TINY, ranks, "experts")


def test_a_rank_with_another_checkpoint_is_named(tmp_path: Path) -> None:
    for result in by_ranks(other_checkpoint, 3, tmp_path):
        assert result.kind == "ContractError" and "rank 2: checkpoint: got" in result.text
        assert "rank 2: format of the experts: got int4_24, expected dense as rank 0" in result.text


def shared_by(ranks: Ranks, kind: str, exchange: Any) -> Qwen3Moe:
    return load_shared(TINY / "nowhere", ranks, kind, exchange=exchange)


@pytest.mark.parametrize(
    ("kind", "exchange", "words"),
    [
        ("experts", "pigeon", "unknown exchange; got 'pigeon'"),
        ("experts", None, "unknown exchange; got None"),
        ("tensor", "hierarchical", "an exchange is of shared experts; got exchange='hierarchical', kind='tensor'"),
    ],
)
def test_an_exchange_that_serves_nothing_is_refused_before_weights_are_read(
    kind: str, exchange: Any, words: str, tmp_path: Path
) -> None:
    for result in by_ranks(shared_by, 2, tmp_path, kind, exchange):
        assert result.kind == "RequestError" and words in result.text, result


FACTS = {"ttnn_moe": "1", "checkpoint": "abc", "K": "8", "layout": "experts, 4 ranks"}


@pytest.mark.parametrize("field", FACTS)
@pytest.mark.parametrize("rank", range(3))
def test_the_handshake_names_rank_field_and_values(field: str, rank: int) -> None:
    facts = [dict(FACTS) for _ in range(3)]
    compare(facts)
    facts[rank][field] = "other"
    with pytest.raises(ContractError, match=f"rank {rank}: {field}: got other, expected {FACTS[field]}"):
        compare(facts)
    del facts[rank][field]
    with pytest.raises(ContractError, match=f"rank {rank}: {field}: got nothing"):
        compare(facts)


@pytest.mark.parametrize(
    "kind, D, words",
    [
        ("experts", 3, "num_experts = 16; expected multiples of 3; to fix it: "),
        ("tensor", 3, "num_attention_heads = 4"),
        ("tensor", 8, "num_attention_heads"),
    ],
)
def test_numbers_of_ranks_that_do_not_divide_are_refused(kind: str, D: int, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Split(kind, D, 0).local(Checkpoint(TINY).config)


@pytest.mark.parametrize(("kv_heads", "taken"), [(2, True), (12, True), (3, True), (4, False)])
def test_ranks_share_key_value_heads_evenly(kv_heads: int, taken: bool) -> None:
    """Of 6 ranks, 2 or 3 hold the same head, or each holds several."""
    sizes = {"moe_intermediate_size": 12, "intermediate_size": 12, "vocab_size": 12}
    config = replace(Checkpoint(TINY).config, num_attention_heads=12, num_key_value_heads=kv_heads, **sizes)
    if taken:
        assert Split("tensor", 6, 0).local(config).num_key_value_heads == max(1, kv_heads // 6)
    else:
        with pytest.raises(RequestError, match="num_key_value_heads = 4; .*a multiple or a divisor"):
            Split("tensor", 6, 0).local(config)
