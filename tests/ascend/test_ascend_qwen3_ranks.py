"""Qwen3-MoE shared by two and four processes, as on NPUs: by tensors and by experts, with attention over pages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ascend_stand_in
from npu_graphs import Npu
from paths import TINY
from ttnn_moe import registry
from ttnn_moe.kv.npu_paged import NpuPagedCache
from ttnn_moe.models.qwen3 import Engine, Qwen3Moe, generate
from ttnn_moe.models.qwen3.runtime import graphs
from ttnn_moe.models.qwen3.runtime.graphs import NpuGraphs
from ttnn_moe.models.qwen3.tiny import tasks
from ttnn_moe.models.qwen3.tokenizer import Tokenizer
from ttnn_moe.models.qwen3.weights import load_model

parallel = pytest.importorskip("ttnn_moe.models.qwen3.parallel")

NEW = 5
FP16 = torch.float16


def texts() -> list[list[int]]:
    """A held-out prompt of each of three tasks."""
    tokenizer = Tokenizer.from_directory(TINY)
    asked = [tasks.examples(task, "heldout", 1)[0].messages for task in sorted(tasks.TASKS)[:3]]
    return [
        tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True), add_special_tokens=False)
        for messages in asked
    ]


def answers(model: Qwen3Moe, asked: list[list[int]], graphs: bool) -> list[list[int]]:
    cache = NpuPagedCache(model.cache_sizes, 4, 512, 16, ascend_stand_in.npu())
    engine = Engine(model, cache=cache, prefill_chunk=48, graphs=graphs)
    return generate(model, asked, max_new_tokens=NEW, stop_ids=(), engine=engine, prefill_chunk=48).tokens


def process(rank: int, folder: str) -> None:
    """Four ranks; then two of them alone."""
    torch.set_num_threads(1)
    os.environ["HCCL_BUFFSIZE"] = "400"
    registry.register("ascend", ascend_stand_in.TARGET)
    graphs.graphs_for = lambda device, alone: NpuGraphs(Npu(), alone)
    Qwen3Moe.why_not_captured = lambda self: None  # type: ignore[method-assign]
    for size in (4, 2):
        if rank < size:
            torch.save(shared(rank, size, folder), f"{folder}/{size}.{rank}")


def shared(rank: int, size: int, folder: str) -> dict[str, list[list[int]]]:
    """The tokens of this rank, by the kind of the split."""
    from ttnn_moe.parallel.ranks import Ranks

    ranks = Ranks(dist.FileStore(f"{folder}/store{size}", size), rank, size, timeout=120)
    with ranks.watched():
        asked = texts()
        # decode steps are graphs, collectives and all
        found = {"tensor": answers(parallel.load_shared(TINY, ranks, "tensor", "ascend", FP16), asked, True)}
        model = parallel.load_shared(TINY, ranks, "experts", "ascend", FP16)
        found["experts"] = answers(model, own(asked, rank, size), False)
        model.leave()
    ranks.close()
    return found


def own(of_all: list[list[int]], rank: int, size: int) -> list[list[int]]:
    """By experts, every rank has its own requests; the last has none."""
    return of_all[rank :: size - 1] if rank < size - 1 else []


@pytest.mark.slow(40)
def test_two_and_four_processes_give_the_references_tokens(tmp_path: Path) -> None:
    expected = generate(load_model(TINY, "reference", "cpu", FP16), texts(), max_new_tokens=NEW, stop_ids=()).tokens
    torch.multiprocessing.spawn(process, (str(tmp_path),), nprocs=4)
    for size in (4, 2):
        for rank in range(size):
            found = torch.load(tmp_path / f"{size}.{rank}")
            assert found == {"tensor": expected, "experts": own(expected, rank, size)}
