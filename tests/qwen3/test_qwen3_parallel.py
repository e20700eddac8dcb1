"""Processes that share the bundled checkpoint by experts or by tensors: their tokens, and the bytes that they read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from model_ranks import by_ranks
from shared_models import NEW, TASKS, prompts, requests_of, shared_tokens, tokens_alone
from ttnn_moe.kv import pages
from ttnn_moe.kv.paged import PagedCache
from ttnn_moe.models.qwen3 import TINY, Engine, generate, pieces
from ttnn_moe.models.qwen3.checkpoint import EXPERTS, Checkpoint
from ttnn_moe.models.qwen3.parallel import load_shared
from ttnn_moe.models.qwen3.split import Split
from ttnn_moe.parallel.ranks import Ranks
from ttnn_moe.sizes import power_of_2

WAYS = [
    pytest.param("experts", 2, "all_to_all", id="experts-2"),
    pytest.param("experts", 4, "hierarchical", id="experts-4-hierarchical", marks=pytest.mark.slow(4)),
    pytest.param("tensor", 2, "auto", id="tensor-2"),
    pytest.param("tensor", 4, "auto", id="tensor-4", marks=pytest.mark.slow(3)),
]


def share_of(split: Split) -> int:
    """Bytes of the checkpoint that a rank must read: what it holds, whatever the loader does."""
    checkpoint = Checkpoint(TINY)
    total = 0
    for name, header in checkpoint.headers.items():
        nbytes, parts = pieces.bytes_of(header), 1
        if split.kind == "experts" and EXPERTS in name:
            parts = split.D
        if split.kind == "tensor" and any(f"{p}_proj" in name for p in ("q", "o", "gate", "up", "down")):
            parts = split.D
        if split.kind == "tensor" and any(f"{p}_proj" in name for p in ("k", "v")):
            parts = min(split.D, checkpoint.config.num_key_value_heads)
        total += nbytes // parts
    return total


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return tokens_alone("cpu")


@pytest.mark.parametrize("kind, size, exchange", WAYS)
def test_every_rank_gets_one_processs_tokens(
    kind: str, size: int, exchange: str, alone: list[list[int]], tmp_path: Path
) -> None:
    for rank, result in enumerate(by_ranks(shared_tokens, size, tmp_path, kind, exchange)):
        assert isinstance(result, dict), result
        if kind == "experts":
            assert result["tokens"] == {i: alone[i][:new] for i, new in requests_of(rank)}
            assert result["failed"] == (1 if rank == 0 else 0)
        else:
            assert result["tokens"] == alone
        assert result["bytes"] == share_of(Split(kind, size, rank))


def with_other_memory(ranks: Ranks) -> tuple[int, list[list[int]]]:
    """An engine for more rows than fit, on ranks that have memory for so many pages each."""
    model = load_shared(TINY, ranks, "tensor", dtype=torch.float32)
    one = PagedCache.page_bytes(model.cache_sizes)
    pages.free_memory = lambda device: (5, 3)[ranks.rank] * one // 4 * 5 + 5
    engine = Engine(model, rows=4, capacity=128)
    return engine.cache.total, generate(model, prompts(), engine=engine, max_new_tokens=NEW).tokens


def test_ranks_of_tensors_keep_as_many_pages_as_each_other(alone: list[list[int]], tmp_path: Path) -> None:
    """Else they would admit other requests to a step, whose parts they sum."""
    assert by_ranks(with_other_memory, 2, tmp_path, timeout=12.0) == [(3, alone)] * 2


def drawn(ranks: Ranks) -> list[list[int]]:
    model = load_shared(TINY, ranks, "tensor")
    engine, made = Engine(model, rows=1, capacity=64), list[list[int]]()
    for _ in range(2):
        number = engine.add([1, 2, 3], max_new_tokens=20, temperature=100.0, stop_ids=())
        made.append([token.token for token in engine.stream(number)])
    return made + generate(model, [[1, 2, 3]], max_new_tokens=20, temperature=100.0, stop_ids=()).tokens


def test_ranks_of_tensors_draw_the_same_tokens_where_no_seed_is_given(tmp_path: Path) -> None:
    one, other = by_ranks(drawn, 2, tmp_path)
    assert one == other and len({tuple(tokens) for tokens in one}) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("exchange", ["tensor", "hierarchical", "all_to_all"])
def test_several_gpus_make_one_processs_tokens(exchange: str, gpus: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    alone = tokens_alone("cuda")
    tie = TASKS.index("Copy: zz9 q")  # in bf16 its third token is one of two with the same logit
    kind, by = ("tensor", "auto") if exchange == "tensor" else ("experts", exchange)
    for rank, result in enumerate(by_ranks(shared_tokens, gpus, tmp_path, kind, by, device="cuda")):
        assert isinstance(result, dict), result
        found = result["tokens"] if kind == "experts" else dict(enumerate(result["tokens"]))
        assert list(found) == ([i for i, _ in requests_of(rank)] if kind == "experts" else list(range(len(TASKS))))
        for prompt, tokens in found.items():
            assert prompt == tie or tokens == alone[prompt][: len(tokens)]


def order_of_layers(ranks: Ranks) -> list[tuple[str, int]]:
    """What the layers do: "made" or "ran", of a size. Rank 1 only serves."""
    model, said = load_shared(TINY, ranks, "experts", exchange="all_to_all"), []

    def heard(moe: Any) -> None:
        prepared, add_experts = moe.prepared, moe.add_experts

        def making(T: int) -> Any:
            if power_of_2(T) not in moe._prepared:
                said.append(("made", power_of_2(T)))
            return prepared(T)

        def running(*args: Any) -> torch.Tensor:
            said.append(("ran", power_of_2(model.turns.most)))
            return add_experts(*args)

        moe.prepared, moe.add_experts = making, running

    for moe in model.shared():
        heard(moe)
    if ranks.rank == 0:
        generate(model, prompts()[:1], max_new_tokens=2)
    model.leave()
    return said


def test_all_layers_of_a_size_are_made_before_one_runs(tmp_path: Path) -> None:
    """Else a kernel of the first layer may wait for a rank that waits for this host, which waits for the kernel."""
    for said in by_ranks(order_of_layers, 2, tmp_path):
        sizes = {size for _, size in said}
        assert len(sizes) == 2, said
        for size in sizes:
            words = [word for word, of in said if of == size]
            assert words == sorted(words) and words[-1] == "ran", words
