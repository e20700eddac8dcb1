"""Inputs, experts and placements of the layers that tests of expert parallelism share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ttnn_moe import Experts, Placement, Problem

E, K, H, I, MOST = 8, 3, 64, 32, 16
# what each rank has: the last ends with tokens that name no expert, and some names come twice
TOKENS = {2: (16, 0), 4: (5, 16, 0, 1)}
EXCHANGES = ("all_to_all", "all_gather", "dispatch_combine", "hierarchical")


def inputs(rank: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(100 + rank)
    ids = torch.randint(-1, E + 1, (tokens, K), generator=g, dtype=torch.int32)  # -1 and E are no expert
    hidden = torch.randn(tokens, H, generator=g).bfloat16()
    if tokens > 3:
        ids[0], ids[1], ids[2] = torch.tensor([4, 1, 4]), 7, -1
        hidden[2, 0] = float("nan")  # in a token that has no expert: its output is zero
        hidden[3, 0], ids[3, 0] = float("inf"), 5  # in one that has: it stays there
    return hidden, ids, torch.rand(tokens, K, generator=g)


def experts_of_all() -> Experts:
    g = torch.Generator().manual_seed(9)
    gate_up = (torch.randn(E, 2 * I, H, generator=g) * H**-0.5).bfloat16()
    return Experts.dense(gate_up, (torch.randn(E, H, I, generator=g) * I**-0.5).bfloat16())


def placement_of(size: int, rank: int | None = None) -> Placement:
    """Not contiguous: experts are dealt out, in descending order on odd devices."""
    rows = [list(range(d, E, size))[:: -1 if d % 2 else 1] for d in range(size)]
    return Placement.from_mapping(rows, rank)


ALONE = Problem(MOST, E, K, H, I, torch.bfloat16)


@contextmanager
def one_process(folder: Path) -> Iterator[Placement]:
    """A process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    yield placement_of(1, 0)
    dist.destroy_process_group()
