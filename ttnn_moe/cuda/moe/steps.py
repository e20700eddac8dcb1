"""The step operators: rows of a step layout through the Triton kernels, which have a launch for each step."""

from __future__ import annotations

import torch

from ...contract import Experts, Problem, Routing
from ...errors import BackendUnavailable
from ..device import gpu
from .pairs import tiles_bound, why_not_few
from .triton_launch import SortedRows
from .triton_tiles import MOST_PAIRS, SortedTiles, sorted_tiles


def step_tiles(routing: Routing, experts: Experts) -> SortedTiles:
    """Tiles of the steps, which always sort. Few tokens get the tiles of MOST_PAIRS more.

    Raises:
        BackendUnavailable: the experts are not dense.
    """
    if experts.format != "dense":
        raise BackendUnavailable(
            "the steps run dense weights on CUDA",
            got=f"{experts.format!r} experts",
            remedy="call ttnn_moe.moe, or the steps on backend 'reference'",
        )
    dtype = experts.tensors["down"].dtype

    def problem(T: int) -> Problem:
        return Problem(T, routing.E, routing.K, experts.H, experts.I, dtype)

    of = problem(routing.T)
    if why_not_few(of, MOST_PAIRS) is None:
        of = problem(routing.T + MOST_PAIRS)
    return sorted_tiles(of, gpu(routing.topk_ids.device))


def step_rows(routing: Routing, row_align: int, m: int) -> SortedRows:
    """The rows of the step tensors in tiles of m."""
    layout = routing.step_layout(row_align)
    start = layout.row_start
    bound = tiles_bound(layout.capacity, routing.E, m)
    tiles_of = (start.diff() + m - 1) // m
    last = tiles_of.cumsum(0)
    tile = torch.arange(bound, device=start.device)
    # past the last tile: any expert, never read
    expert = torch.searchsorted(last, tile, right=True).clamp_max(routing.E - 1)
    first = start[expert] + (tile - (last - tiles_of)[expert]) * m
    begin = torch.stack([expert, first], 1).int()
    return SortedRows(start, layout.row_tokens, layout.inverse, begin, last[-1:].int(), bound)
